// SPDX-License-Identifier: Apache-2.0
// A block's config, checked, with what its group tells: all that the sizes of its memory follow from.
#pragma once

#include <memory>

#include "epx/epx_moe.h"
#include "moe/block/exchange.h"
#include "moe/ffn/ffn.h"

namespace epx::moe {

struct BlockPlan {
  epx_moe_router_config router;
  FfnShape ffn; // of this rank's experts
  epx_dtype dtype;
  epx_dtype real; // of weights
  epx_layer layer;
  bool is_early;
  bool recomputes;
  Exchange::Shape shape;
  int64_t num_rows; // N: rows of its tensors; R, or the max_rows of its arena

  bool is_on_gpu() const { return shape.place == Place::cuda; }
};

struct PlannedBlock {
  BlockPlan plan;
  std::unique_ptr<Exchange> exchange;
};

// Local: the group, which may be NULL, makes no call. The config, its router and its ffn have passed require_struct. Throws when
// the config is no good, or does not fit the group.
PlannedBlock plan_block(epx_group group, const epx_moe_block_config& config);

} // namespace epx::moe
