// The dense parts of the model, on a few rows at a time. Matrices are row-major; weights are [out, in].
#pragma once

#include <cstdint>

namespace train {

// y[rows, out] = x[rows, in] * weight[out, in]^T + bias[out]; bias may be NULL.
void linear(const float* x, const float* weight, const float* bias, int64_t rows, int64_t in, int64_t out, float* y);

// Overwrites grad_weight[out, in] and grad_bias[out], which may be NULL, and grad_x[rows, in] (adds to it with add_to_grad_x).
struct LinearGrads {
  float* grad_x = nullptr;
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;
  bool add_to_grad_x = false;
};
void linear_bwd(const float* x, const float* weight, const float* grad_y, int64_t rows, int64_t in, int64_t out,
                const LinearGrads& grads);

// y = x / sqrt(mean(x^2) + epsilon), row by row (arXiv:1910.07467, without gain).
void rms_norm(const float* x, int64_t rows, int64_t width, float* y);
// Adds to grad_x.
void rms_norm_bwd(const float* x, const float* grad_y, int64_t rows, int64_t width, float* grad_x);

// Sum over the rows of -log softmax(logits[rows, classes])[target]; `logits` become its gradient times scale.
double cross_entropy(float* logits, const unsigned char* targets, int64_t rows, int64_t classes, float scale);

} // namespace train
