// SPDX-License-Identifier: Apache-2.0
// One step of AdamW (arXiv:1711.05101) for one parameter, on the host and on GPUs.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define TRAIN_HOST_DEVICE __host__ __device__
#else
#define TRAIN_HOST_DEVICE
#endif

namespace train {

inline constexpr double kAdamBeta1 = 0.9;
inline constexpr double kAdamBeta2 = 0.99;

// Is the same for all elements of a tensor.
struct AdamWStep {
  double learning_rate;
  double correction1, correction2; // 1 - beta^step
  float decay;                     // learning rate times weight decay
};

struct AdamWVectors {
  float* values;
  const float* grads;
  float* first_moments;
  float* second_moments;
};

TRAIN_HOST_DEVICE inline void adamw_update(const AdamWStep& step, const AdamWVectors& vectors, int64_t i) {
  constexpr double kEpsilon = 1e-8;
  const float grad = vectors.grads[i];
  float& m = vectors.first_moments[i];
  float& v = vectors.second_moments[i];
  m += static_cast<float>(1 - kAdamBeta1) * (grad - m);
  v += static_cast<float>(1 - kAdamBeta2) * (grad * grad - v);
  const double update = m / step.correction1 / (std::sqrt(v / step.correction2) + kEpsilon);
  vectors.values[i] -= step.decay * vectors.values[i] + static_cast<float>(step.learning_rate * update);
}

} // namespace train
