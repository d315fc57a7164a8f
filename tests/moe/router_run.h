// SPDX-License-Identifier: Apache-2.0
// Calls epx_moe_router and epx_moe_aux_loss for the tests, with scribbled outputs.
#pragma once

#include <type_traits>
#include <utility>

#include "epx/epx_moe.hpp"
#include "tests/moe/tensors.h"

namespace epx::test {

inline constexpr epx_moe_score kScores[] = {EPX_MOE_TOPK_THEN_SOFTMAX, EPX_MOE_SOFTMAX_THEN_TOPK, EPX_MOE_SIGMOID};

inline epx_moe_router_config router_config(int num_experts, int top_k, epx_moe_score score = EPX_MOE_TOPK_THEN_SOFTMAX) {
  moe::RouterConfig config;
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

template <typename Logit, typename Index = int64_t>
Routed<RealOf<Logit>, Index> run_router(const epx_moe_router_config& config, const Tensor<Logit>& logits,
                                        const std::type_identity_t<Tensor<RealOf<Logit>>>* bias = nullptr,
                                        const Tensor<uint8_t>* mask = nullptr) {
  using Real = RealOf<Logit>;
  if constexpr (std::is_same_v<Logit, double>) {
    if (on_cuda()) { // there is no float64
      const auto narrow_bias = bias != nullptr ? converted<float>(*bias) : Tensor<float>();
      auto routed =
          run_router<float, Index>(config, converted<float>(logits), bias != nullptr ? &narrow_bias : nullptr, mask);
      return {std::move(routed.topk_idx), converted<double>(routed.topk_weights), std::move(routed.info)};
    }
  }
  Routed<Real, Index> routed = {scribbled<Index>({logits.size(0), config.top_k}),
                                scribbled<Real>({logits.size(0), config.top_k}), scribbled<int64_t>({3})};
  epx_moe_router_args args = {};
  args.struct_size = sizeof(args);
  args.cuda = place_of_call();
  args.logits = logits.get();
  args.selection_bias = bias != nullptr ? bias->get() : nullptr;
  args.token_mask = mask != nullptr ? mask->get() : nullptr;
  args.topk_idx = routed.topk_idx.get();
  args.topk_weights = routed.topk_weights.get();
  args.info = routed.info.get();
  require_ok(epx_moe_router(&config, &args), "epx_moe_router");
  finish_call();
  return routed;
}

template <typename Logit, typename Index>
double aux_loss(const epx_moe_router_config& config, const Tensor<Logit>& logits, const Tensor<int64_t>& topk_idx,
                const Tensor<Index>& global_counts) {
  if constexpr (std::is_same_v<Logit, double>)
    if (on_cuda()) return aux_loss(config, converted<float>(logits), topk_idx, global_counts);
  auto loss = scribbled<double>({1});
  epx_moe_aux_loss_args args = {};
  args.struct_size = sizeof(args);
  args.logits = logits.get();
  args.topk_idx = topk_idx.get();
  args.global_counts = global_counts.get();
  args.loss = loss.get();
  args.cuda = place_of_call(epx_moe_aux_loss_workspace, &config, &args);
  require_ok(epx_moe_aux_loss(&config, &args), "epx_moe_aux_loss");
  finish_call();
  return loss[0];
}

template <typename Real, typename Index>
struct Gradient {
  const Tensor<Real>* weights = nullptr;
  const Tensor<Index>* global_counts = nullptr;
  double aux_loss = 0;
};

template <typename Logit, typename Index = int32_t>
Tensor<Logit> run_router_bwd(const epx_moe_router_config& config, const Tensor<Logit>& logits,
                             const Tensor<int64_t>& topk_idx,
                             const std::type_identity_t<Gradient<RealOf<Logit>, Index>>& gradient) {
  if constexpr (std::is_same_v<Logit, double>) {
    if (on_cuda()) {
      const auto narrow = gradient.weights != nullptr ? converted<float>(*gradient.weights) : Tensor<float>();
      return converted<double>(run_router_bwd<float, Index>(
          config, converted<float>(logits), topk_idx,
          {gradient.weights != nullptr ? &narrow : nullptr, gradient.global_counts, gradient.aux_loss}));
    }
  }
  auto grad_logits = scribbled<Logit>({logits.size(0), logits.size(1)});
  epx_moe_router_bwd_args args = {};
  args.struct_size = sizeof(args);
  args.logits = logits.get();
  args.topk_idx = topk_idx.get();
  args.grad_topk_weights = gradient.weights != nullptr ? gradient.weights->get() : nullptr;
  args.global_counts = gradient.global_counts != nullptr ? gradient.global_counts->get() : nullptr;
  args.aux_loss_grad = gradient.aux_loss;
  args.grad_logits = grad_logits.get();
  args.cuda = place_of_call(epx_moe_router_bwd_workspace, &config, &args);
  require_ok(epx_moe_router_bwd(&config, &args), "epx_moe_router_bwd");
  finish_call();
  return grad_logits;
}

// Logits whose order, and that of sums of two, a finite step cannot change: evenly spaced in a random order, then jittered.
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
