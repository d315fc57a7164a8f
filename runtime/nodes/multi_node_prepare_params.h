// SPDX-License-Identifier: Apache-2.0
// The parameters that the kernels of prepare over nodes have in common. See multi_node_prepare.cu.
#pragma once

#include <algorithm>

#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/stages/cuda/kernel_list.h"

namespace epx::cuda {

struct MultiNodePrepareParams {
  MultiNodeDevice nodes;
  MultiNodePrepareBuffers buffers;
  PrepareCall call;
  epx_operation operation; // prepare or prepare_dispatch
  MultiNodeHandleLayout layout;
  int num_parts; // the tokens of this rank are partitioned among so many blocks, at most kMaxPrepareBlocks

  EPX_HOST_DEVICE MultiNodeHandleWriter plan() const { return {call.handle_mem, layout, nodes.shape}; }
  // Counts of routes by expert [E] of one part, and later of the parts before it.
  EPX_HOST_DEVICE int32_t* part_counts(int part) const {
    return buffers.block_counts + int64_t{part} * nodes.shape.group.num_experts;
  }
  // What a rank has contributed to the all-gather.
  EPX_HOST_DEVICE const int32_t* counts_of(int rank) const {
    return buffers.all_counts + rank * count_words(nodes.shape.group);
  }
  EPX_HOST_DEVICE ExpertBlocks experts() const { return {nodes.shape.group.num_experts, nodes.shape.group.num_ranks}; }
  EPX_HOST_DEVICE bool limits_rail_tokens() const { return nodes.shape.max_rail_tokens() < call.num_tokens; }
  EPX_HOST_DEVICE ZoneRule zones() const {
    return {usable_slots(nodes.shape.group.max_recv_tokens, call.alignment), call.alignment, call.zone_stride};
  }
  // Returns the end of the slots that an expert's zone may have. Zones that are not a stride apart end together.
  EPX_HOST_DEVICE int64_t end_of_zone(int expert) const {
    const int local = expert - experts().first_expert(experts().rank_of(expert));
    return zones().end(call.zone_stride * local);
  }
};

// The routes that a part has at least, while there are several parts.
constexpr int64_t kRoutesPerPart = 512;

inline MultiNodePrepareParams make_multi_node_prepare_params(const MultiNodeDevice& nodes,
                                                             const MultiNodePrepareBuffers& buffers,
                                                             const PrepareCall& call, epx_operation operation) {
  const int64_t parts = (call.num_tokens * call.top_k + kRoutesPerPart - 1) / kRoutesPerPart;
  return {nodes,
          buffers,
          call,
          operation,
          make_multi_node_handle_layout(nodes.shape, call.top_k),
          static_cast<int>(std::clamp<int64_t>(parts, 1, kMaxPrepareBlocks))};
}

} // namespace epx::cuda
