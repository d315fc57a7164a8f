// SPDX-License-Identifier: Apache-2.0
// Rules of the router that hold on the host and on CUDA.
#pragma once

#include <cstdint>
#include <limits>

#include "epx/epx_moe.h"

namespace epx::moe {

// How many of a group's best experts its score is made of.
constexpr int experts_in_group_score(const epx_moe_router_config& config) {
  return config.group_score_top_k != 0 ? config.group_score_top_k : config.top_k / config.topk_groups;
}

// Renormalised weights, and the probabilities of sigmoids, are scores divided by their sum. Scores underflow where logits are far
// below 0, or far below the largest of a softmax; their ratios do not. A sum below this says so, and the shares then come
// from the logits. Earlier versions added 1e-20 to each sum. Half a unit in the last place of a sum from here on is at least
// 2^-66, which is more than 1e-20, so such a sum is the same without it, and so is every share.
template <typename T>
constexpr T kSmallSum = T{1} / static_cast<T>(int64_t{1} << (66 - std::numeric_limits<T>::digits)); // 2^-42 or 2^-13

// What an expert's share of the load weighs in the load-balance loss, E * c / (K * T_g^2), from the routes of all ranks.
constexpr double aux_scale(const epx_moe_router_config& config, double total_routes) {
  if (total_routes == 0) return 0;
  const double tokens = total_routes / config.top_k;
  return config.num_experts * config.aux_loss_coeff / (config.top_k * tokens * tokens);
}

// What an expert with so many routes gets added to its selection bias.
template <typename T>
constexpr T bias_step(double mean_routes, double routes, T rate) {
  const double lack = mean_routes - routes;
  return lack > 0 ? rate : lack < 0 ? -rate : T{0};
}

} // namespace epx::moe
