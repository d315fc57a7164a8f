// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "base/error.h"
#include "moe/router/router.h"

namespace epx::moe {

void validate(const epx_moe_router_config& config) {
  const int32_t experts = config.num_experts;
  const int32_t top_k = config.top_k;
  const int32_t groups = config.num_groups;
  const int32_t topk_groups = config.topk_groups;
  if (experts < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "num_experts is {}; it must be at least 1 (it has no default)", experts);
  if (top_k < 1 || top_k > experts)
    fail(EPX_ERROR_INVALID_ARGUMENT, "top_k is {}; it must be 1..num_experts = {}", top_k, experts);
  if (config.score != EPX_MOE_TOPK_THEN_SOFTMAX && config.score != EPX_MOE_SOFTMAX_THEN_TOPK &&
      config.score != EPX_MOE_SIGMOID)
    fail(EPX_ERROR_INVALID_ARGUMENT, "score is {}; it must be an epx_moe_score", static_cast<int>(config.score));
  if (groups < 1) fail(EPX_ERROR_INVALID_ARGUMENT, "num_groups is {}; it must be at least 1", groups);
  if (experts % groups != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "num_groups is {}; it must divide num_experts = {}", groups, experts);
  if (topk_groups < 1 || topk_groups > groups)
    fail(EPX_ERROR_INVALID_ARGUMENT, "topk_groups is {}; it must be 1..num_groups = {}", topk_groups, groups);
  const int32_t group_size = experts / groups;
  if (top_k > topk_groups * group_size)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "top_k is {}; topk_groups = {} groups of num_experts / num_groups = {} / {} experts have only {}", top_k,
         topk_groups, experts, groups, topk_groups * group_size);
  if (config.group_score_top_k < 0 || config.group_score_top_k > group_size)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "group_score_top_k is {}; it must be 0 (for top_k / topk_groups), or 1..num_experts / num_groups = {}",
         config.group_score_top_k, group_size);
  if (config.group_score_top_k == 0 && top_k % topk_groups != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "topk_groups is {}; it must divide top_k = {} where group_score_top_k is 0: set group_score_top_k", topk_groups,
         top_k);
  if (config.renormalize != 0 && config.renormalize != 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "renormalize is {}; it must be 0 or 1", config.renormalize);
  if (!std::isfinite(config.scaling_factor))
    fail(EPX_ERROR_INVALID_ARGUMENT, "scaling_factor is {}; it must be finite", config.scaling_factor);
  if (!std::isfinite(config.aux_loss_coeff))
    fail(EPX_ERROR_INVALID_ARGUMENT, "aux_loss_coeff is {}; it must be finite", config.aux_loss_coeff);
  for (const int64_t reserved : {int64_t{config.reserved0}, config.reserved[0], config.reserved[1], config.reserved[2]})
    if (reserved != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "a reserved field of the router's config is {}; it must be 0", reserved);
}

} // namespace epx::moe
