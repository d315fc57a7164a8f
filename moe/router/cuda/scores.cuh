// SPDX-License-Identifier: Apache-2.0
// Logits and scores on the device, in float32.
#pragma once

#include <cuda_bf16.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "epx/epx_moe.h"
#include "moe/cuda/warps.cuh"
#include "moe/router/rules.h"

namespace epx::moe::cuda {

__device__ inline bool is_nan(float x) {
  return x != x;
}

// A number as unsigned bits in the same order, above 0. -0 is +0, since the two are equal.
__device__ inline uint32_t ordered_bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_ordered_bits(uint32_t bits) {
  return std::bit_cast<float>((bits >> 31) != 0 ? bits & 0x7fffffffu : ~bits);
}

__device__ inline float max_of_lanes(float x) {
  return from_ordered_bits(__reduce_max_sync(~0u, ordered_bits(x)));
}

__device__ inline float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

// A softmax, by the largest of its logits and the sum of exp(logit - top); NaN where the host's is.
struct Softmax {
  float top = 0, sum = 0;

  __device__ float operator()(float logit) const { return expf(logit - top) / sum; }
};

// Calls visit(index) for the indices of this lane.
template <typename Visit>
__device__ inline void for_each_of_lane(int count, const Visit& visit) {
#pragma unroll 1
  for (int i = lane(); i < count; i += kWarp)
    visit(i);
}

// The softmax over logit_of(0) ... logit_of(count - 1); count >= 1.
template <typename LogitOf>
__device__ inline Softmax make_softmax(int count, const LogitOf& logit_of) {
  Softmax softmax;
  float top = -INFINITY;
  for_each_of_lane(count, [&](int i) { top = fmaxf(top, logit_of(i)); });
  softmax.top = max_of_lanes(top);
  float sum = 0;
  for_each_of_lane(count, [&](int i) { sum += expf(logit_of(i) - softmax.top); });
  softmax.sum = sum_of_lanes(sum);
  return softmax;
}

// The shares in their sum of scores, of a softmax or sigmoids, that add up to less than kSmallSum: sigmoid(logit) is exp(logit)
// there, since 1 + exp(logit) is 1 in float32. 0 where all logits are -infinity.
template <typename LogitOf>
__device__ inline Softmax make_shares(int count, const LogitOf& logit_of) {
  const Softmax softmax = make_softmax(count, logit_of);
  return softmax.top == -INFINITY ? Softmax{0, 1} : softmax;
}

} // namespace epx::moe::cuda
