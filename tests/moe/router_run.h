// SPDX-License-Identifier: Apache-2.0
// Calls epx_moe_router and epx_moe_aux_loss for the tests, with scribbled outputs.
#pragma once

#include <type_traits>

#include "epx/epx_moe.h"
#include "tests/moe/tensors.h"

namespace epx::test {

inline constexpr epx_moe_score kScores[] = {EPX_MOE_TOPK_THEN_SOFTMAX, EPX_MOE_SOFTMAX_THEN_TOPK, EPX_MOE_SIGMOID};

inline epx_moe_router_config router_config(int num_experts, int top_k, epx_moe_score score = EPX_MOE_TOPK_THEN_SOFTMAX) {
  epx_moe_router_config config;
  require_ok(epx_moe_router_config_init(&config), "epx_moe_router_config_init");
  config.num_experts = num_experts;
  config.top_k = top_k;
  config.score = score;
  return config;
}

template <typename Real, typename Index>
struct Routed {
  Tensor<Index> topk_idx;    // [T, K]
  Tensor<Real> topk_weights; // [T, K]
  Tensor<int64_t> info;      // [3]
};

template <typename Real, typename Index = int64_t>
Routed<Real, Index> run_router(const epx_moe_router_config& config, const Tensor<Real>& logits,
                               const std::type_identity_t<Tensor<Real>>* bias = nullptr,
                               const Tensor<uint8_t>* mask = nullptr) {
  Routed<Real, Index> routed = {scribbled<Index>({logits.size(0), config.top_k}),
                                scribbled<Real>({logits.size(0), config.top_k}), scribbled<int64_t>({3})};
  epx_moe_router_args args = {};
  args.struct_size = sizeof(args);
  args.logits = logits.get();
  args.selection_bias = bias != nullptr ? bias->get() : nullptr;
  args.token_mask = mask != nullptr ? mask->get() : nullptr;
  args.topk_idx = routed.topk_idx.get();
  args.topk_weights = routed.topk_weights.get();
  args.info = routed.info.get();
  require_ok(epx_moe_router(&config, &args), "epx_moe_router");
  return routed;
}

template <typename Index>
double aux_loss(const epx_moe_router_config& config, const Tensor<double>& logits, const Tensor<int64_t>& topk_idx,
                const Tensor<Index>& global_counts) {
  auto loss = scribbled<double>({1});
  epx_moe_aux_loss_args args = {};
  args.struct_size = sizeof(args);
  args.logits = logits.get();
  args.topk_idx = topk_idx.get();
  args.global_counts = global_counts.get();
  args.loss = loss.get();
  require_ok(epx_moe_aux_loss(&config, &args), "epx_moe_aux_loss");
  return loss[0];
}

// Returns logits whose order, and that of sums of two, a finite step cannot change: evenly spaced, jittered, in random order.
inline Tensor<double> spaced_logits(int64_t num_tokens, int64_t num_experts, Rng& rng) {
  Tensor<double> logits({num_tokens, num_experts});
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t other = rng.below(e + 1); // Fisher-Yates
      logits(t, e) = logits(t, other);
      logits(t, other) = 0.4 * static_cast<double>(e) - 1 + uniform(rng, -0.1, 0.1);
    }
  }
  return logits;
}

} // namespace epx::test
