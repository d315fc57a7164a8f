// SPDX-License-Identifier: Apache-2.0
// Activations and their derivatives, element by element, for host and device.
#pragma once

#include <cmath>
#include <numbers>

#include "base/host_device.h"
#include "epx/epx_moe.h"

namespace epx::moe {

template <typename T>
EPX_HOST_DEVICE T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}

// Phi, the distribution function of the normal distribution.
template <typename T>
EPX_HOST_DEVICE T normal_cdf(T x) {
  return T{0.5} * std::erfc(-x / std::numbers::sqrt2_v<T>);
}

template <typename T>
EPX_HOST_DEVICE T swiglu(T gate, T up) {
  return gate * sigmoid(gate) * up;
}

template <typename T>
struct GateUp {
  T gate, up;
};

// Gradients of gate and up from that of swiglu(gate, up).
template <typename T>
EPX_HOST_DEVICE GateUp<T> swiglu_bwd(T gate, T up, T grad) {
  const T s = sigmoid(gate);
  return {grad * up * s * (1 + gate * (1 - s)), grad * gate * s};
}

template <typename T>
EPX_HOST_DEVICE T ungated(epx_moe_activation activation, T up) {
  if (activation == EPX_MOE_GELU) return up * normal_cdf(up);
  const T positive = up > 0 ? up : up < 0 ? T{0} : up; // keeps a NaN
  return positive * positive;
}

template <typename T>
EPX_HOST_DEVICE T ungated_bwd(epx_moe_activation activation, T up, T grad) {
  if (activation == EPX_MOE_GELU) {
    const T density = std::exp(-up * up / 2) * std::numbers::inv_sqrtpi_v<T> / std::numbers::sqrt2_v<T>;
    return grad * (normal_cdf(up) + up * density);
  }
  return grad * 2 * (up > 0 ? up : up < 0 ? T{0} : up);
}

} // namespace epx::moe
