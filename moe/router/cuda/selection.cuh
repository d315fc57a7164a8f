// SPDX-License-Identifier: Apache-2.0
// The selection that a caller gives back to the router's calls: it may be anything.
#pragma once

#include "moe/cuda/report.cuh"
#include "moe/integers.h"
#include "moe/router/cuda/scores.cuh"

namespace epx::moe::cuda {

// Returns whether the token has K different experts; reports a row that has neither these nor only -1. All lanes call this, and
// all get the same.
__device__ inline bool has_experts(const Integers& topk_idx, int64_t token, const epx_moe_router_config& config,
                                   const ErrorSink& errors) {
  const int64_t first = token * config.top_k;
  const bool claims = topk_idx[first] >= 0;
  bool is_good = true;
  for_each_of_lane(config.top_k, [&](int k) {
    const int64_t expert = topk_idx[first + k];
    if (claims ? expert < 0 || expert >= config.num_experts : expert != -1) {
      is_good = false;
      report(errors, EPX_MOE_ERROR_EXPERT, token, k, expert, config.num_experts);
      return;
    }
    if (!claims) return;
    bool is_duplicate = false;
#pragma unroll 1
    for (int other = 0; other < k; ++other)
      is_duplicate |= topk_idx[first + other] == expert;
    if (!is_duplicate) return;
    is_good = false;
    report(errors, EPX_MOE_ERROR_DUPLICATE_EXPERT, token, k, expert);
  });
  return __all_sync(~0u, is_good ? 1 : 0) != 0 && claims;
}

} // namespace epx::moe::cuda
