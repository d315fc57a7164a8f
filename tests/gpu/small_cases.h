// SPDX-License-Identifier: Apache-2.0
// These groups and layers are small, and some of them overflow.
#pragma once

#include "tests/support/case.h"
#include "tests/support/group_run.h"

namespace epx::test {

inline GroupCase small_group(const RankContext& context, epx_combine_precision precision) {
  GroupCase group;
  group.num_ranks = context.num_ranks;
  group.num_experts = 12;
  group.max_tokens = 24;
  group.hidden_dim = 264;
  group.max_top_k = 4;
  group.max_recv_rows = 300;
  group.max_dtype = EPX_BFLOAT16;
  group.precision = precision;
  group.overflow = EPX_OVERFLOW_DROP;
  return group;
}

inline LayerCase small_layer(int top_k, int alignment, RoutingStyle routing) {
  LayerCase layer;
  layer.top_k = top_k;
  layer.alignment = alignment;
  layer.routing = routing;
  layer.percent_masked = 5;
  layer.rows = RecvRows::capacity;
  if (ranks_per_node(GroupCase{}) == 0) layer.rank_major = RankMajorRows::max_tokens; // over nodes it is refused
  layer.hidden = layer.combine_hidden = 264;
  layer.dtype = layer.combine_dtype = EPX_BFLOAT16;
  return layer;
}

} // namespace epx::test
