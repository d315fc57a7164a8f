// SPDX-License-Identifier: Apache-2.0
// The load of the experts on the device: ExpertLoad of router.h.
#pragma once

#include "moe/cuda/report.cuh"
#include "moe/integers.h"
#include "moe/router/cuda/scores.cuh"

namespace epx::moe::cuda {

// The routes to an expert, summed over the ranks; exact below 2^53.
__device__ inline double routes_to(const Integers& global_counts, int64_t num_ranks, int num_experts, int expert,
                                   const ErrorSink& errors) {
  double routes = 0;
#pragma unroll 1
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t count = global_counts[rank * num_experts + expert];
    if (count >= 0)
      routes += static_cast<double>(count);
    else
      report(errors, EPX_MOE_ERROR_COUNT, rank, expert, count);
  }
  return routes;
}

// p[t, e] of the load-balance loss for one token. All lanes construct it.
template <typename Logit>
class BalanceProbabilities {
public:
  __device__ BalanceProbabilities(const epx_moe_router_config& config, const Logit* logits)
      : is_sigmoid_(config.score == EPX_MOE_SIGMOID) {
    const auto logit_of = [&](int e) { return static_cast<float>(logits[e]); };
    if (!is_sigmoid_) {
      softmax_ = make_softmax(config.num_experts, logit_of);
      return;
    }
    float sum = 0;
    for_each_of_lane(config.num_experts, [&](int e) { sum += sigmoid(logit_of(e)); });
    sum_ = sum_of_lanes(sum);
    if (!(sum_ < kSmallSum<float>)) return;
    softmax_ = make_shares(config.num_experts, logit_of);
    is_sigmoid_ = false;
  }

  __device__ float operator()(float logit) const { return is_sigmoid_ ? sigmoid(logit) / sum_ : softmax_(logit); }

  // The gradient of a logit from that of its probability; `mean` is the sum over the experts of p * grad.
  __device__ float backward(float logit, float grad, float mean) const {
    if (!is_sigmoid_) return softmax_(logit) * (grad - mean);
    const float score = sigmoid(logit);
    return score * (1.0f - score) * ((grad - mean) / sum_);
  }

private:
  bool is_sigmoid_; // sigmoids divided by their sum; else the softmax
  Softmax softmax_;
  float sum_ = 1; // of the sigmoids
};

} // namespace epx::moe::cuda
