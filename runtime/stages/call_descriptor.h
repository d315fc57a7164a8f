// SPDX-License-Identifier: Apache-2.0
// The one maker of call descriptors, for host and kernels: a descriptor follows from the arguments of the call, and from where
// its rows lie in memory that peers reach. What only the call itself finds out (plan_id; of a leg, num_tokens) is 0.
#pragma once

#include <bit>

#include "runtime/layout/window_layout.h"
#include "runtime/stages/stages.h"

namespace epx {

constexpr int64_t sidecar_bytes_of(const DispatchCall& call) {
  return call.sidecar_bytes;
}
constexpr int64_t sidecar_bytes_of(const MovementCall&) {
  return 0;
}
// Only the call that makes a plan says how it places rows.
constexpr epx_row_spacing row_spacing_of(const DispatchRankMajorCall& call) {
  return call.is_compact ? EPX_ROWS_COMPACT : EPX_ROWS_STRIDED;
}
constexpr epx_row_spacing row_spacing_of(const MovementCall&) {
  return EPX_ROWS_STRIDED;
}

// A call without tensors. `subject` is the number of the allocation that mem_free frees.
constexpr CallDescriptor describe(epx_operation operation, int64_t subject = 0) {
  CallDescriptor descriptor{};
  descriptor.operation = static_cast<uint8_t>(operation);
  descriptor.subject = subject;
  descriptor.rows_allocation = descriptor.weights_allocation = kNotRegistered.allocation;
  return descriptor;
}

// prepare, alone or as a part of `operation`.
constexpr CallDescriptor describe(const PrepareCall& call, epx_operation operation = EPX_OP_PREPARE) {
  CallDescriptor descriptor = describe(operation, call.zone_stride);
  descriptor.top_k = static_cast<uint8_t>(call.top_k);
  descriptor.alignment = call.alignment;
  descriptor.num_tokens = call.num_tokens;
  return descriptor;
}

// A movement, with fields that its base class does not know. `rows` is the place of the receive rows, `row_weights` that of
// their weights.
constexpr CallDescriptor describe_movement(const MovementCall& call, int32_t weights, int64_t sidecar_bytes,
                                           const AllocationPlace& rows = kNotRegistered,
                                           const AllocationPlace& row_weights = kNotRegistered) {
  CallDescriptor descriptor = describe(call.operation, call.is_rank_major() ? call.rows_per_source : 0);
  descriptor.top_k = static_cast<uint8_t>(call.top_k);
  descriptor.weights = static_cast<uint8_t>(weights) & 0xf;
  descriptor.dtype = static_cast<uint8_t>(call.dtype);
  descriptor.recv_dtype = static_cast<uint8_t>(call.recv_dtype);
  descriptor.scaling = static_cast<uint8_t>(call.format.scaling);
  descriptor.element_dtype = static_cast<uint8_t>(call.format.elements);
  descriptor.scale_dtype = static_cast<uint8_t>(call.format.scales);
  descriptor.amax_floor = std::bit_cast<uint32_t>(call.format.amax_floor);
  descriptor.alignment = call.alignment;
  descriptor.hidden = call.hidden;
  descriptor.sidecar_bytes = static_cast<int32_t>(sidecar_bytes);
  descriptor.num_tokens = call.num_tokens;
  descriptor.recv_rows = call.recv_rows;
  descriptor.rows_allocation = rows.allocation;
  descriptor.rows_offset = rows.offset;
  descriptor.weights_allocation = row_weights.allocation;
  descriptor.weights_offset = row_weights.offset;
  return descriptor;
}

template <typename Call> // a movement
constexpr CallDescriptor describe(const Call& call, const AllocationPlace& rows,
                                  const AllocationPlace& row_weights = kNotRegistered) {
  CallDescriptor descriptor = describe_movement(call, call.passed_weights(), sidecar_bytes_of(call), rows, row_weights);
  descriptor.row_spacing = static_cast<uint8_t>(row_spacing_of(call)) & 0xf;
  return descriptor;
}

constexpr CallDescriptor describe(const PrepareDispatchCall& call, const AllocationPlace& rows) {
  CallDescriptor descriptor = describe(call.dispatch, rows);
  descriptor.subject = call.prepare.zone_stride;
  return descriptor;
}

constexpr CallDescriptor describe(const RaggedAllToAllCall& call, const AllocationPlace& output) {
  CallDescriptor descriptor = describe(EPX_OP_RAGGED_ALL_TO_ALL, call.num_slices);
  descriptor.row_spacing = call.is_transposed ? 1 : 0;
  descriptor.hidden = static_cast<int32_t>(call.row_bytes);
  descriptor.num_tokens = call.operand_rows;
  descriptor.recv_rows = call.output_rows;
  descriptor.rows_allocation = output.allocation;
  descriptor.rows_offset = output.offset;
  return descriptor;
}

} // namespace epx
