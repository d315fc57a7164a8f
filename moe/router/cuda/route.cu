// SPDX-License-Identifier: Apache-2.0
// The router's forward. A warp takes a token; lane l holds experts l, l + 32, ... in registers, as the bits of their keys
// (score + bias) in an order of unsigned integers, so that one redux.sync finds the best key of the warp, and a second one the
// lowest expert that has it.
//
// Selection stores no marks: the k-th expert is the best of those that are strictly behind the (k - 1)-th in the order (key,
// lower expert first). With more experts than kMaxValues * 32 the keys are computed anew from the logits in each step: they
// are in the L1 cache, and registers would spill.
//
// With groups, the warp first finds the scores of all groups, by the same steps, and keeps them in shared memory. Only groups
// that are not behind the last selected one are candidates then.
#include <climits>

#include "moe/router/cuda/kernels.h"

#include "base/device/kernel_addresses.h"
#include "moe/router/cuda/scores.cuh"
#include "moe/router/rules.h"

namespace epx::moe::cuda {
namespace {

struct Params {
  RouteCall call;
  float scaling_factor;
};

// A place in the order (key, lower index first).
struct Choice {
  uint32_t key; // ordered bits; 0: no candidate
  int index;

  __device__ bool is_behind(const Choice& other) const {
    return key < other.key || (key == other.key && index > other.index);
  }
};
__device__ constexpr Choice before_all() {
  return {~0u, -1};
}

// The best choice of the lanes, in every lane.
__device__ inline Choice best_of_lanes(const Choice& own) {
  const uint32_t key = __reduce_max_sync(~0u, own.key);
  return {key, __reduce_min_sync(~0u, own.key == key ? own.index : INT_MAX)};
}

// All lanes make the same calls. kValues: keys in a lane's registers; 0: none are kept.
template <typename Logit, int kValues>
class TokenRouter {
public:
  __device__ TokenRouter(const Params& params, int64_t token, float* group_scores)
      : call_(params.call), config_(params.call.config), scaling_factor_(params.scaling_factor), token_(token),
        logits_(static_cast<const Logit*>(params.call.logits.data) + token * params.call.config.num_experts),
        group_scores_(group_scores) {}

  // Writes the token's experts and weights. Returns false when the token is bad; what it has written then means nothing.
  __device__ bool route() { return compute_keys() && select_groups() && select_experts(); }

  __device__ void write_none() const {
    for_each_of_lane(config_.top_k, [&](int k) {
      call_.topk_idx.set(route_of(k), -1);
      call_.topk_weights[route_of(k)] = 0;
    });
  }

private:
  __device__ int64_t route_of(int k) const { return token_ * config_.top_k + k; }
  __device__ float logit_of(int expert) const { return static_cast<float>(logits_[expert]); }
  __device__ float score_of(float logit) const {
    switch (config_.score) {
    case EPX_MOE_SOFTMAX_THEN_TOPK:
      return softmax_(logit);
    case EPX_MOE_SIGMOID:
      return sigmoid(logit);
    default:
      return logit;
    }
  }
  __device__ float key_of(int expert) const {
    const float score = score_of(logit_of(expert));
    return call_.selection_bias != nullptr ? score + call_.selection_bias[expert] : score;
  }

  // Calls visit(i, expert) for the lane's experts of [first, end), of which the i-th is in register i.
  template <typename Visit>
  __device__ void for_each_own(int first, int end, const Visit& visit) const {
    if constexpr (kValues > 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        if (const int expert = i * kWarp + lane(); expert >= first && expert < end) visit(i, expert);
    } else {
#pragma unroll 1
      for (int expert = first + lane(); expert < end; expert += kWarp)
        visit(0, expert);
    }
  }

  // Returns false when a key is NaN, as it is when its logit is.
  __device__ bool compute_keys() {
    if (config_.score == EPX_MOE_SOFTMAX_THEN_TOPK)
      softmax_ = make_softmax(config_.num_experts, [&](int expert) { return logit_of(expert); });
    bool has_nan = false;
    for_each_own(0, config_.num_experts, [&](int i, int expert) {
      const float key = key_of(expert);
      has_nan |= is_nan(key);
      if constexpr (kValues > 0) keys_[i] = ordered_bits(key);
    });
    return __any_sync(~0u, has_nan ? 1 : 0) == 0;
  }

  __device__ bool is_candidate(int expert) const {
    if (!has_threshold_) return true;
    const int group = expert / group_size();
    return !Choice{ordered_bits(group_scores_[group]), group}.is_behind(threshold_);
  }
  // Returns the ordered bits of the key of an expert, or 0 for none that may be selected.
  __device__ uint32_t candidate_key(int i, int expert) const {
    if constexpr (kValues > 0)
      return keys_[i];
    else
      return is_candidate(expert) ? ordered_bits(key_of(expert)) : 0;
  }
  // Returns the best expert of [first, end) that is behind `last`.
  __device__ Choice next(int first, int end, const Choice& last) const {
    Choice best{0, INT_MAX};
    for_each_own(first, end, [&](int i, int expert) { // ascending, so that of equal keys the first one stays
      const Choice choice{candidate_key(i, expert), expert};
      if (choice.key > best.key && choice.is_behind(last)) best = choice;
    });
    return best_of_lanes(best);
  }

  __device__ int group_size() const {
    return config_.num_experts / config_.num_groups;
  }

  // Returns false when a group's score is NaN.
  __device__ bool select_groups() {
    if (config_.num_groups == 1) return true;
    __syncwarp(); // all lanes have read the scores of the token before
    bool has_nan = false;
#pragma unroll 1
    for (int group = 0; group < config_.num_groups; ++group) {
      const int first = group * group_size();
      float score = 0;
      Choice last = before_all();
#pragma unroll 1
      for (int i = 0; i < experts_in_group_score(config_); ++i) {
        last = next(first, first + group_size(), last);
        score += from_ordered_bits(last.key);
      }
      has_nan |= is_nan(score);
      if (lane() == 0) group_scores_[group] = score;
    }
    __syncwarp();
    if (has_nan) return false; // the same in all lanes
    Choice last = before_all();
#pragma unroll 1
    for (int i = 0; i < config_.topk_groups; ++i) {
      Choice best{0, INT_MAX};
      for_each_of_lane(config_.num_groups, [&](int group) {
        const Choice choice{ordered_bits(group_scores_[group]), group};
        if (choice.key > best.key && choice.is_behind(last)) best = choice;
      });
      last = best_of_lanes(best);
    }
    threshold_ = last;
    has_threshold_ = true;
    if constexpr (kValues > 0)
      for_each_own(0, config_.num_experts, [&](int i, int expert) { keys_[i] = is_candidate(expert) ? keys_[i] : 0; });
    return true;
  }

  __device__ bool select_experts() const {
    Choice last = before_all();
#pragma unroll 1
    for (int k = 0; k < config_.top_k; ++k) {
      last = next(0, config_.num_experts, last);
      // There are always K candidates, unless someone writes to the logits meanwhile; the index is bounded even then.
      if (k % kWarp == lane()) call_.topk_idx.set(route_of(k), min(last.index, config_.num_experts - 1));
    }
    return weigh();
  }

  // Each lane weighs the experts whose indices it has stored itself.
  __device__ bool weigh() const {
    const auto selected_logit = [&](int k) { return logit_of(static_cast<int>(call_.topk_idx[route_of(k)])); };
    const auto score_at = [&](int k) { return score_of(selected_logit(k)); };
    Softmax softmax;
    float divisor = 1;
    bool is_softmax = config_.score == EPX_MOE_TOPK_THEN_SOFTMAX;
    if (is_softmax) {
      softmax = make_softmax(config_.top_k, selected_logit);
    } else if (config_.renormalize != 0) {
      float sum = 0;
      for_each_of_lane(config_.top_k, [&](int k) { sum += score_at(k); });
      divisor = sum_of_lanes(sum);
      is_softmax = divisor < kSmallSum<float>;
      if (is_softmax) softmax = make_shares(config_.top_k, selected_logit);
    }
    bool has_nan = false;
    for_each_of_lane(config_.top_k, [&](int k) {
      float weight = is_softmax ? softmax(selected_logit(k)) : score_at(k) / divisor;
      weight *= scaling_factor_;
      has_nan |= is_nan(weight);
      call_.topk_weights[route_of(k)] = weight;
    });
    return __any_sync(~0u, has_nan ? 1 : 0) == 0;
  }

  const RouteCall& call_;
  const epx_moe_router_config& config_;
  float scaling_factor_;
  int64_t token_;
  const Logit* logits_; // [E]
  float* group_scores_; // [num_groups], in shared memory
  Softmax softmax_;     // over all experts
  uint32_t keys_[kValues > 0 ? kValues : 1] = {};
  Choice threshold_{}; // the last group that is selected
  bool has_threshold_ = false;
};

//   warps  what they do                          what they wait for
//   all    route one token after the other       nothing
template <typename Logit, int kValues>
__global__ void __launch_bounds__(kThreads) route_kernel(const __grid_constant__ Params params) {
  const RouteCall& call = params.call;
  float* const group_scores = epx::cuda::dynamic_shared_memory<float>() + warp_of_block() * call.config.num_groups;
  for_each_item(call.logits.num_tokens, [&](int64_t token) {
    auto* const info = reinterpret_cast<unsigned long long*>(call.info);
    const bool is_masked = call.token_mask != nullptr && call.token_mask[token] == 0;
    TokenRouter<Logit, kValues> router(params, token, group_scores);
    if (!is_masked && router.route()) return;
    router.write_none();
    if (info == nullptr || lane() != 0) return;
    atomicAdd(&info[is_masked ? 0 : 1], 1ull);
    if (!is_masked) atomicMin(&info[2], static_cast<unsigned long long>(token)); // -1 is the largest of them
  });
}

constexpr int kMaxValues = 16;

template <typename Logit>
auto kernel_of(int num_experts) {
  if (num_experts <= 2 * kWarp) return &route_kernel<Logit, 2>;
  if (num_experts <= 8 * kWarp) return &route_kernel<Logit, 8>;
  if (num_experts <= kMaxValues * kWarp) return &route_kernel<Logit, kMaxValues>;
  return &route_kernel<Logit, 0>;
}

// Masked tokens and bad ones count from 0; the first bad one is -1 until there is one.
cudaError_t clear_info(int64_t* info, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(info, 0, 2 * sizeof(*info), stream);
  return error == cudaSuccess ? cudaMemsetAsync(info + 2, 0xff, sizeof(*info), stream) : error;
}

} // namespace

std::vector<const void*> route_kernels() {
  using Bf16 = __nv_bfloat16;
  return epx::cuda::addresses_of(&route_kernel<float, 2>, &route_kernel<float, 8>, &route_kernel<float, kMaxValues>,
                                 &route_kernel<float, 0>, &route_kernel<Bf16, 2>, &route_kernel<Bf16, 8>,
                                 &route_kernel<Bf16, kMaxValues>, &route_kernel<Bf16, 0>);
}

int launch_route(const RouteCall& call, const LaunchTarget& target) {
  if (call.info != nullptr)
    if (const cudaError_t error = clear_info(call.info, stream_of(target)); error != cudaSuccess) return error;
  if (call.logits.num_tokens == 0) return cudaSuccess;
  const int groups = call.config.num_groups;
  const size_t shared_bytes = groups > 1 ? sizeof(float) * static_cast<size_t>(groups) * kWarpsPerBlock : 0;
  const int experts = call.config.num_experts;
  return epx::cuda::launch(call.logits.are_bfloat16 ? kernel_of<__nv_bfloat16>(experts) : kernel_of<float>(experts),
                           grid_of_warps(call.logits.num_tokens, target, shared_bytes), stream_of(target),
                           Params{call, static_cast<float>(call.config.scaling_factor)});
}

} // namespace epx::moe::cuda
