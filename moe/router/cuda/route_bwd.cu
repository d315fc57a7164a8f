// SPDX-License-Identifier: Apache-2.0
// The router's backward. A warp takes a token; lane l takes experts l, l + 32, ..., and reads the token's logits several times
// from the L1 cache. Nothing is added in memory: the warp first stores the gradient of every expert as if it were not selected,
// and then stores those of the selected ones over it.
#include "moe/router/cuda/kernels.h"

#include "base/device/kernel_addresses.h"
#include "moe/router/cuda/load.cuh"
#include "moe/router/cuda/selection.cuh"

namespace epx::moe::cuda {
namespace {

// The gradient through the weights of the selected experts.
template <typename Logit>
class WeightGradient {
public:
  __device__ WeightGradient(const RouteBwdCall& call, int64_t token, const Logit* logits)
      : score_(call.config.score), scaling_factor_(static_cast<float>(call.config.scaling_factor)),
        grads_(call.grad_topk_weights != nullptr ? call.grad_topk_weights + token * call.config.top_k : nullptr) {
    if (grads_ == nullptr) return;
    const epx_moe_router_config& config = call.config;
    const int64_t first = token * config.top_k;
    const auto logit_at = [&](int k) { return static_cast<float>(logits[call.topk_idx[first + k]]); };
    if (score_ == EPX_MOE_TOPK_THEN_SOFTMAX) softmax_ = make_softmax(config.top_k, logit_at);
    if (score_ == EPX_MOE_SOFTMAX_THEN_TOPK)
      softmax_ = make_softmax(config.num_experts, [&](int e) { return static_cast<float>(logits[e]); });
    const auto dot = [&] { // of the scores of the selected experts and their gradients
      float sum = 0;
      for_each_of_lane(config.top_k, [&](int k) { sum += score_of(logit_at(k)) * grad_at(k); });
      return sum_of_lanes(sum);
    };
    if (score_ != EPX_MOE_TOPK_THEN_SOFTMAX && config.renormalize != 0) {
      float sum = 0;
      for_each_of_lane(config.top_k, [&](int k) { sum += score_of(logit_at(k)); });
      sum = sum_of_lanes(sum);
      if (sum < kSmallSum<float>) { // the weights are shares of the selected logits, as those of a softmax are
        softmax_ = make_shares(config.top_k, logit_at);
        score_ = EPX_MOE_TOPK_THEN_SOFTMAX;
      } else {
        renormalized_mean_ = dot() / sum;
        renormalized_sum_ = sum;
      }
    }
    if (score_ != EPX_MOE_SIGMOID) mean_ = dot();
  }

  // Of an expert that is not selected.
  __device__ float unselected(float logit) const {
    return grads_ != nullptr && score_ == EPX_MOE_SOFTMAX_THEN_TOPK ? softmax_(logit) * (0.0f - mean_) : 0.0f;
  }
  // Of the k-th selected one.
  __device__ float selected(int k, float logit) const {
    if (grads_ == nullptr) return 0;
    const float score = score_of(logit);
    return score_ == EPX_MOE_SIGMOID ? score * (1.0f - score) * grad_at(k) : score * (grad_at(k) - mean_);
  }

private:
  __device__ float score_of(float logit) const { return score_ == EPX_MOE_SIGMOID ? sigmoid(logit) : softmax_(logit); }
  // The gradient of the k-th score; before renormalisation is known about, that of the k-th weight.
  __device__ float grad_at(int k) const { return (grads_[k] * scaling_factor_ - renormalized_mean_) / renormalized_sum_; }

  epx_moe_score score_;
  float scaling_factor_;
  const float* grads_; // [K] or NULL
  Softmax softmax_;    // over the selected experts or over all
  float renormalized_mean_ = 0, renormalized_sum_ = 1;
  float mean_ = 0;
};

// The gradient through the load-balance loss.
template <typename Logit>
class BalanceGradient {
public:
  __device__ BalanceGradient(const RouteBwdCall& call, const Logit* logits)
      : load_(call.load), probabilities_(call.config, logits) {
    scale_ = aux_scale(call.config, load_[call.config.num_experts]) * call.aux_loss_grad;
    float sum = 0;
    for_each_of_lane(call.config.num_experts,
                     [&](int e) { sum += probabilities_(static_cast<float>(logits[e])) * grad_of(e); });
    mean_ = sum_of_lanes(sum);
  }

  __device__ float operator()(int expert, float logit) const {
    return probabilities_.backward(logit, grad_of(expert), mean_);
  }

private:
  __device__ float grad_of(int expert) const { return static_cast<float>(scale_ * load_[expert]); }

  const double* load_;
  BalanceProbabilities<Logit> probabilities_;
  double scale_;
  float mean_;
};

//   warps  what they do                          what they wait for
//   all    take one token after the other        nothing
template <typename Logit, bool kHasLoad>
__global__ void __launch_bounds__(kThreads) route_bwd_kernel(const __grid_constant__ RouteBwdCall call) {
  const epx_moe_router_config& config = call.config;
  const int experts = config.num_experts;
  for_each_item(call.logits.num_tokens, [&](int64_t token) {
    const Logit* const logits = static_cast<const Logit*>(call.logits.data) + token * experts;
    Logit* const grads = static_cast<Logit*>(call.grad_logits) + token * experts;
    if (!has_experts(call.topk_idx, token, config, call.errors)) {
      for_each_of_lane(experts, [&](int e) { grads[e] = Logit(0.0f); });
      return;
    }
    const auto write = [&](const auto& through_balance) {
      const WeightGradient<Logit> through_weights(call, token, logits);
      for_each_of_lane(experts, [&](int e) {
        const float logit = static_cast<float>(logits[e]);
        grads[e] = Logit(through_weights.unselected(logit) + through_balance(e, logit));
      });
      __syncwarp(); // another lane may have stored the gradient of an expert that this one stores next
      for_each_of_lane(config.top_k, [&](int k) {
        const auto e = static_cast<int>(call.topk_idx[token * config.top_k + k]);
        const float logit = static_cast<float>(logits[e]);
        grads[e] = Logit(through_weights.selected(k, logit) + through_balance(e, logit));
      });
    };
    if constexpr (kHasLoad)
      write(BalanceGradient<Logit>(call, logits));
    else
      write([](int, float) { return 0.0f; });
  });
}

} // namespace

std::vector<const void*> route_bwd_kernels() {
  return epx::cuda::addresses_of(&route_bwd_kernel<float, false>, &route_bwd_kernel<float, true>,
                                 &route_bwd_kernel<__nv_bfloat16, false>, &route_bwd_kernel<__nv_bfloat16, true>);
}

int launch_route_bwd(const RouteBwdCall& call, const LaunchTarget& target) {
  if (call.logits.num_tokens == 0) return cudaSuccess;
  const epx::cuda::Grid grid = grid_of_warps(call.logits.num_tokens, target);
  const bool has_load = call.load != nullptr;
  if (call.logits.are_bfloat16)
    return epx::cuda::launch(has_load ? &route_bwd_kernel<__nv_bfloat16, true> : &route_bwd_kernel<__nv_bfloat16, false>,
                             grid, stream_of(target), call);
  return epx::cuda::launch(has_load ? &route_bwd_kernel<float, true> : &route_bwd_kernel<float, false>, grid,
                           stream_of(target), call);
}

} // namespace epx::moe::cuda
