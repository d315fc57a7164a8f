// SPDX-License-Identifier: Apache-2.0
#include "moe/block/plan.h"

#include <algorithm>
#include <limits>

#include "base/dtypes.h"
#include "base/error.h"
#include "moe/block/group.h"
#include "moe/cuda/cuda_call.h"
#include "moe/ffn/fp8/calls.h"
#include "moe/names.h"
#include "moe/router/cuda/kernels.h"
#include "moe/router/router.h"
#include "runtime/formats/format_arguments.h"

namespace epx::moe {
namespace {

constexpr const char* kFormatName = "dispatch_format"; // in messages

// The wire alone is quantised: no scales come with a block's rows, and none arrive.
void require_format(const epx_row_format& format, const epx_moe_block_config& config) {
  require_no_tensors(format, kFormatName, "a block's rows come and arrive in its dtype, without scales");
  if (format.scale_layout != EPX_SCALES_ROWS)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}.scale_layout is {}; rows arrive without scales, so it must be EPX_SCALES_ROWS (0)",
         kFormatName, static_cast<int>(format.scale_layout));
  const WireFormat wire = check_format(format, kFormatName);
  require_whole_bytes(wire, config.ffn->hidden_dim, kFormatName);
  if (!is_token_dtype(config.dtype))
    fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}; with a dispatch_format it must be float32, float16 or bfloat16",
         name_of(config.dtype));
}

// Products in FP8 of rows that travel so.
void require_recipe(const epx_moe_block_config& config) {
  if (config.recipe == EPX_MOE_RECIPE_WIDE) return;
  if (config.recipe != EPX_MOE_RECIPE_FP8_ACTIVATIONS && config.recipe != EPX_MOE_RECIPE_FP8)
    fail(EPX_ERROR_INVALID_ARGUMENT, "recipe is {}; it must be an epx_moe_recipe", static_cast<int>(config.recipe));
  require_fp8_shape(make_ffn_shape(*config.ffn), "ffn");
  if (config.weighting != EPX_MOE_WEIGHT_EARLY)
    fail(EPX_ERROR_INVALID_ARGUMENT, "weighting is EPX_MOE_WEIGHT_LATE (0); with a recipe in FP8 it must be EARLY (1)");
  if (config.dispatch_format != nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "dispatch_format is given; a recipe in FP8 has its own, and it must be NULL");
  if (config.recipe == EPX_MOE_RECIPE_FP8 && (config.alignment == 0 || config.alignment % kFp8ZoneAlignment != 0))
    fail(EPX_ERROR_INVALID_ARGUMENT, "alignment is {}; with EPX_MOE_RECIPE_FP8 it must be a multiple of {}",
         config.alignment, kFp8ZoneAlignment);
}

// Paths that move rows as they are, and whose experts apply the weights.
void require_path(const epx_moe_block_config& config) {
  if (config.path == EPX_MOE_PATH_DISPATCH) return;
  if (config.path != EPX_MOE_PATH_RING && config.path != EPX_MOE_PATH_RAGGED)
    fail(EPX_ERROR_INVALID_ARGUMENT, "path is {}; it must be an epx_moe_path", static_cast<int>(config.path));
  if (config.weighting != EPX_MOE_WEIGHT_EARLY)
    fail(EPX_ERROR_INVALID_ARGUMENT, "weighting is EPX_MOE_WEIGHT_LATE (0); on path {} it must be EARLY (1)",
         name_of(config.path));
  if (config.recipe != EPX_MOE_RECIPE_WIDE)
    fail(EPX_ERROR_INVALID_ARGUMENT, "recipe is {}; on path {} it must be wide", name_of(config.recipe),
         name_of(config.path));
  if (config.dispatch_format != nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "dispatch_format is given; on path {} it must be NULL", name_of(config.path));
}

// Slices are of one node, and few enough.
void require_path_fits(const epx_group_info& info, const epx_moe_block_config& config) {
  if (config.path == EPX_MOE_PATH_DISPATCH) return;
  if (info.ranks_per_node != info.num_ranks)
    fail(EPX_ERROR_UNSUPPORTED, "path is {}; the group has {} nodes, between which slices do not travel",
         name_of(config.path), info.num_ranks / info.ranks_per_node);
  const int64_t most_experts = (int64_t{info.num_experts} + info.num_ranks - 1) / info.num_ranks; // of a rank
  if (info.num_ranks * most_experts > EPX_MAX_SLICES)
    fail(EPX_ERROR_INVALID_ARGUMENT, "path is {}; {} experts on {} ranks are more than its {} slices", name_of(config.path),
         info.num_experts, info.num_ranks, static_cast<int>(EPX_MAX_SLICES));
}

// Throws unless the rows that a recipe in FP8 leaves wide have the dtype that its products write.
void require_wide(const BlockPlan& plan) {
  const epx_dtype wide = plan.is_on_gpu() ? EPX_BFLOAT16 : EPX_FLOAT32;
  if (plan.is_fp8() && plan.dtype != wide)
    fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}; with a recipe in FP8 it must be {} where the block computes on {}",
         name_of(plan.dtype), name_of(wide), plan.is_on_gpu() ? "a GPU" : "the host");
}

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
  if (config.dispatch_format != nullptr) require_format(*config.dispatch_format, config);
  require_recipe(config);
  require_path(config);
  with_real(config.dtype, [&]<typename T>(T) {
    require_finite<T>(config.router->scaling_factor, "router.scaling_factor");
    require_finite<T>(config.router->aux_loss_coeff, "router.aux_loss_coeff");
  });
}

void require_fit(const epx_group_info& info, const epx_moe_block_config& config) {
  const bool on_gpu = info.transport != EPX_TRANSPORT_HOST;
  if (on_gpu && !kWithCuda)
    fail(EPX_ERROR_UNSUPPORTED, "the group's tensors are in GPU memory, and this build of the library has no CUDA");
  if (on_gpu ? !is_token_dtype(config.dtype) : config.dtype != EPX_FLOAT32)
    fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}; with a group {}", name_of(config.dtype),
         on_gpu ? "on GPUs a block computes in float32, float16 or bfloat16"
                : "on the host transport a block computes in float32");
  if (config.router->num_experts != info.num_experts)
    fail(EPX_ERROR_INVALID_ARGUMENT, "router.num_experts is {}; the group has {}", config.router->num_experts,
         info.num_experts);
  if (config.ffn->hidden_dim > info.hidden_dim)
    fail(EPX_ERROR_INVALID_ARGUMENT, "ffn.hidden_dim is {}; the group's hidden_dim is {}", config.ffn->hidden_dim,
         info.hidden_dim);
  if (config.router->top_k > info.max_top_k)
    fail(EPX_ERROR_INVALID_ARGUMENT, "router.top_k is {}; the group's max_top_k is {}", config.router->top_k,
         info.max_top_k);
  if (config.alignment > info.max_alignment)
    fail(EPX_ERROR_INVALID_ARGUMENT, "alignment is {}; the group's max_alignment is {}", config.alignment,
         info.max_alignment);
  if (single_element_bytes(config.dtype) > single_element_bytes(info.max_token_dtype))
    fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}, which is wider than the group's max_token_dtype, {}",
         name_of(config.dtype), name_of(info.max_token_dtype));
}

void plan_with_group(const epx_group_info& info, BlockPlan& plan) {
  plan.place = info.transport == EPX_TRANSPORT_HOST ? Place::host : Place::cuda;
  plan.ffn.num_experts = info.num_local_experts;
  plan.num_ranks = info.num_ranks;
  plan.max_tokens = info.max_tokens_per_rank;
  plan.row_capacity = info.max_recv_tokens_per_rank;
  if (plan.is_on_gpu() && plan.router.num_groups > cuda::kMaxGroups)
    fail(EPX_ERROR_UNSUPPORTED, "router.num_groups is {}; on CUDA it is at most {}", plan.router.num_groups,
         cuda::kMaxGroups);
}

// All experts are here, on the host.
void plan_alone(const epx_moe_block_config& config, BlockPlan& plan) {
  if (config.dtype != EPX_FLOAT32 && config.dtype != EPX_FLOAT64)
    fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}; without a group a block computes on the host, in float32 or float64",
         name_of(config.dtype));
  if (config.max_tokens_per_rank < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "max_tokens_per_rank is {}; without a group it must be at least 1",
         config.max_tokens_per_rank);
  const int32_t alignment = std::max(config.alignment, 1);
  plan.place = Place::host;
  plan.ffn.num_experts = plan.router.num_experts;
  plan.num_ranks = 1;
  plan.max_tokens = config.max_tokens_per_rank;
  plan.row_capacity = plan.max_tokens * plan.router.top_k + int64_t{plan.router.num_experts} * (alignment - 1);
  if (plan.row_capacity > std::numeric_limits<int32_t>::max())
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "max_tokens_per_rank = {}, top_k = {} and alignment = {} make {} rows, more than an int32 can count",
         plan.max_tokens, plan.router.top_k, alignment, plan.row_capacity);
}

} // namespace

void require_rows(const BlockPlan& plan, int64_t num_rows) {
  if (plan.path == EPX_MOE_PATH_DISPATCH) return;
  const int64_t routes = plan.num_ranks * plan.max_tokens * std::min(plan.router.top_k, plan.ffn.num_experts);
  const int64_t most = routes + int64_t{plan.ffn.num_experts} * (std::max(plan.layer.alignment, 1) - 1);
  if (num_rows < most)
    fail(EPX_ERROR_INVALID_ARGUMENT, "path is {}, which drops no route; there is room for {} rows, and {} may come",
         name_of(plan.path), num_rows, most);
}

BlockPlan plan_block(epx_group group, const epx_moe_block_config& config) {
  require_config(config);
  BlockPlan plan{};
  plan.router = *config.router;
  plan.ffn = make_ffn_shape(*config.ffn);
  plan.dtype = config.dtype;
  plan.real = config.dtype == EPX_FLOAT64 ? EPX_FLOAT64 : EPX_FLOAT32;
  plan.layer = {config.router->top_k, config.alignment};
  if (config.dispatch_format != nullptr) plan.dispatch_format = *config.dispatch_format;
  plan.recipe = config.recipe;
  plan.path = config.path;
  plan.is_early = config.weighting == EPX_MOE_WEIGHT_EARLY;
  plan.recomputes = config.recompute == 1;
  if (group == nullptr) {
    plan_alone(config, plan);
  } else {
    const epx_group_info info = query(group);
    require_fit(info, config);
    require_path_fits(info, config);
    plan_with_group(info, plan);
  }
  require_wide(plan);
  return plan;
}

} // namespace epx::moe
