// SPDX-License-Identifier: Apache-2.0
// These are the dense parts of the model, on some rows at a time. Matrices are row-major; weights are [out, in]. T is float, or
// double to check gradients.
#pragma once

#include <cstdint>

namespace train {

// y[rows, out] = x[rows, in] * weight[out, in]^T + bias[out]; bias may be NULL.
template <typename T>
void linear(const T* x, const T* weight, const T* bias, int64_t rows, int64_t in, int64_t out, T* y);

template <typename T>
struct LinearGrads {
  T* grad_x = nullptr;        // [rows, in]
  T* grad_weight = nullptr;   // [out, in]
  T* grad_bias = nullptr;     // [out], or NULL
  bool add_to_grad_x = false; // instead of overwriting it
};
template <typename T>
void linear_bwd(const T* x, const T* weight, const T* grad_y, int64_t rows, int64_t in, int64_t out,
                const LinearGrads<T>& grads);

// y = x / sqrt(mean(x^2) + epsilon), row by row (arXiv:1910.07467, without gain).
template <typename T>
void rms_norm(const T* x, int64_t rows, int64_t width, T* y);
// Adds to grad_x.
template <typename T>
void rms_norm_bwd(const T* x, const T* grad_y, int64_t rows, int64_t width, T* grad_x);

// losses[rows] = -log softmax(logits[rows, classes])[target]; `logits` become the gradient of their sum times scale.
template <typename T>
void cross_entropy(T* logits, const unsigned char* targets, int64_t rows, int64_t classes, T scale, double* losses);

} // namespace train
