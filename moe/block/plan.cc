// SPDX-License-Identifier: Apache-2.0
#include "moe/block/plan.h"

#include "base/error.h"
#include "moe/router/cuda/kernels.h"
#include "moe/router/router.h"
#include "moe/tensors.h"

namespace epx::moe {
namespace {

// Checks all that needs no group.
void require_config(const epx_moe_block_config& config) {
  validate(*config.router);
  make_ffn_shape(*config.ffn);
  if (!is_token_dtype(config.dtype) && config.dtype != EPX_FLOAT64)
    fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}; it must be float32, float16, bfloat16 or float64",
         name_of(config.dtype));
  if (config.weighting != EPX_MOE_WEIGHT_LATE && config.weighting != EPX_MOE_WEIGHT_EARLY)
    fail(EPX_ERROR_INVALID_ARGUMENT, "weighting is {}; it must be an epx_moe_weighting",
         static_cast<int>(config.weighting));
  if (config.alignment < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "alignment is {}; it must not be negative", config.alignment);
  if (config.recompute != 0 && config.recompute != 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "recompute is {}; it must be 0 or 1", config.recompute);
  for (const int64_t reserved : config.reserved)
    if (reserved != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "a reserved field of the block's config is {}; it must be 0", reserved);
  with_real(config.dtype, [&]<typename T>(T) {
    require_finite<T>(config.router->scaling_factor, "router.scaling_factor");
    require_finite<T>(config.router->aux_loss_coeff, "router.aux_loss_coeff");
  });
}

std::unique_ptr<Exchange> make_exchange(epx_group group, const epx_moe_block_config& config) {
  if (group != nullptr) return make_group_exchange(group, config);
  if (config.dtype != EPX_FLOAT32 && config.dtype != EPX_FLOAT64)
    fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}; without a group a block computes on the host, in float32 or float64",
         name_of(config.dtype));
  if (config.max_tokens_per_rank < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "max_tokens_per_rank is {}; without a group it must be at least 1",
         config.max_tokens_per_rank);
  return with_real(config.dtype, [&]<typename T>(T) { return make_local_exchange<T>(config); });
}

} // namespace

PlannedBlock plan_block(epx_group group, const epx_moe_block_config& config) {
  require_config(config);
  std::unique_ptr<Exchange> exchange = make_exchange(group, config);
  BlockPlan plan{};
  plan.router = *config.router;
  plan.ffn = make_ffn_shape(*config.ffn);
  plan.ffn.num_experts = exchange->shape().num_local_experts;
  plan.dtype = config.dtype;
  plan.real = config.dtype == EPX_FLOAT64 ? EPX_FLOAT64 : EPX_FLOAT32;
  plan.layer = {config.router->top_k, config.alignment};
  plan.is_early = config.weighting == EPX_MOE_WEIGHT_EARLY;
  plan.recomputes = config.recompute == 1;
  plan.shape = exchange->shape();
  plan.num_rows = plan.shape.row_capacity;
  if (plan.is_on_gpu() && plan.router.num_groups > cuda::kMaxGroups)
    fail(EPX_ERROR_UNSUPPORTED, "router.num_groups is {}; on CUDA it is at most {}", plan.router.num_groups,
         cuda::kMaxGroups);
  return {plan, std::move(exchange)};
}

} // namespace epx::moe
