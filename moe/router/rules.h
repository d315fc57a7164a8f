// SPDX-License-Identifier: Apache-2.0
// Rules of the router that hold on the host and on CUDA.
#pragma once

#include "epx/epx_moe.h"

namespace epx::moe {

// How many of a group's best experts its score is made of.
constexpr int experts_in_group_score(const epx_moe_router_config& config) {
  return config.group_score_top_k != 0 ? config.group_score_top_k : config.top_k / config.topk_groups;
}

} // namespace epx::moe
