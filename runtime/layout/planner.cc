// SPDX-License-Identifier: Apache-2.0
#include "runtime/layout/planner.h"

#include "runtime/layout/host_scratch.h"
#include "runtime/layout/multi_node_handle.h"
#include "runtime/layout/rail_layout.h"
#include "runtime/layout/window_layout.h"

namespace epx {

epx_memory_plan plan_memory(const GroupShape& shape, epx_transport transport) {
  const WindowAccess access = transport == EPX_TRANSPORT_HOST ? WindowAccess::by_host : WindowAccess::by_kernels;
  const bool has_rails = access == WindowAccess::by_kernels && shape.num_nodes() > 1;
  const MultiNodeShape nodes = make_multi_node_shape(shape, 0); // whose node has as many experts as any
  const WindowLayout layout = make_window_layout(has_rails ? nodes.node : shape, access);
  epx_memory_plan plan{};
  plan.max_recv_tokens_per_rank = shape.max_recv_tokens;
  plan.window_bytes = layout.total_bytes;
  plan.control_bytes = layout.control_bytes();
  plan.count_bytes = layout.counts.bytes + layout.gathered_routes.bytes + layout.slice_records.bytes;
  plan.slot_record_bytes = layout.ll_slot_records.bytes + layout.first_slots.bytes; // and the rank-major routes
  plan.scatter_row_bytes = layout.scatter_rows.bytes + layout.ll_scatter_rows.bytes;
  plan.scatter_sidecar_bytes = layout.scatter_sidecars.bytes;
  plan.scatter_weight_bytes = layout.scatter_weights.bytes + layout.scatter_token_weights.bytes +
                              layout.scatter_ready_flags.bytes + layout.ll_scatter_weights.bytes +
                              layout.ll_rank_major_routes.bytes;
  plan.gather_row_bytes = layout.gather_rows.bytes + layout.ll_gather_rows.bytes;
  plan.gather_weight_bytes = layout.gather_weights.bytes + layout.gather_ready_flags.bytes + layout.ll_gather_weights.bytes;
  if (access == WindowAccess::by_host) plan.scratch_bytes = host::Scratch::bytes(shape);
  if (has_rails) plan.scratch_bytes = rail_bytes(nodes);
  plan.handle_mem_bytes = handle_mem_bytes(shape, access, shape.max_top_k);
  return plan;
}

} // namespace epx
