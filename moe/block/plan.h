// SPDX-License-Identifier: Apache-2.0
// A block's config, checked, with what its group tells: all that the sizes of its memory follow from.
#pragma once

#include <optional>

#include "epx/epx_moe.h"
#include "moe/ffn/ffn.h"
#include "moe/tensors.h"

namespace epx::moe {

struct BlockPlan {
  epx_moe_router_config router;
  FfnShape ffn; // of this rank's experts
  epx_dtype dtype;
  epx_dtype real; // of weights
  epx_layer layer;
  std::optional<epx_row_format> dispatch_format; // of the wire alone; without tensors
  epx_moe_recipe recipe;
  epx_moe_path path;
  bool is_early;
  bool recomputes;
  Place place; // of tensors
  int num_ranks;
  int64_t max_tokens;   // T, per rank
  int64_t row_capacity; // R, the most rows that a rank's experts receive

  bool is_fp8() const { return recipe != EPX_MOE_RECIPE_WIDE; }
  bool is_on_gpu() const { return place == Place::cuda; }
};

// Local: the group, which may be NULL, makes no call. The config, its router, ffn and format have passed require_struct. Throws
// when the config is no good, or does not fit the group.
BlockPlan plan_block(epx_group group, const epx_moe_block_config& config);

// Throws unless so many rows are enough for a path that drops no route.
void require_rows(const BlockPlan& plan, int64_t num_rows);

} // namespace epx::moe
