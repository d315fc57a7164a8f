// SPDX-License-Identifier: Apache-2.0
// A movement: what scatter and gather have in common. It reads the plan in the handle memory, and decides which ranks take part
// and which routes are live in this call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtypes.h"
#include "runtime/layout/handle_limits.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/layout/slots.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/stages.h"

namespace epx::host {

// Of the rows that a call reads, and of those that it writes.
inline int64_t row_bytes(const MovementCall& call) {
  return epx::row_bytes(call.dtype, call.hidden);
}
inline int64_t recv_row_bytes(const MovementCall& call) {
  return epx::row_bytes(call.recv_dtype, call.hidden);
}

// A Movement is one movement in progress, after its entry barrier.
struct Movement {
  const HostGroup& group;
  const MovementCall& call;
  HandleReader plan;
  HandleLimits limits; // clamps what the plan says
  bool takes_part;     // false: the handle memory is not this call's; outputs stay untouched

  bool is_active(int rank) const { return group.scratch.active[static_cast<size_t>(rank)] != 0; }
  // Returns whether a route takes part in this call: prepare kept it, its rank is active, and its slot is below that rank's N.
  bool is_live(const Route& route) const {
    return limits.is_route(route) && is_active(route.rank) &&
           route.slot < group.protocol.descriptor_of(route.rank).recv_rows;
  }
  // Rank-major: returns whether the receive rows of the sources follow each other. No peer knows where this rank has its rows
  // then, so that its descriptor names no place.
  bool is_compact() const { return call.is_rank_major() && plan.header->is_compact != 0; }
  // Returns the row of the receive tensors that a slot of this rank is.
  int64_t row_of_slot(int64_t slot) const {
    if (!is_compact()) return call.row_of_slot(slot);
    return limits.compact_row(plan.source_rows[slot / call.slots_per_source], slot % call.slots_per_source,
                              call.slots_per_source);
  }
  // Rank-major: returns how many rows of a source this rank keeps.
  int64_t rows_of_source(int source) const { return limits.rows(plan.source_rows[source], call.slots_per_source); }
  // Return the zones of this rank's slots, and the slots of each. Those of a rank-major plan are its source ranks, and have no
  // pads. `from` is the end of the zone before this one.
  int num_zones() const {
    return call.is_rank_major() ? group.window.num_ranks : group.experts.num_local_experts(group.window.rank);
  }
  HandleLimits::Zone zone(int index, int64_t from) const {
    if (!call.is_rank_major()) return limits.zone(plan.zone_begin, plan.zone_rows, index, from, call.alignment);
    const int64_t begin = index * call.slots_per_source;
    return {begin, begin + rows_of_source(index), begin + rows_of_source(index)};
  }
  // Return a rank's receive rows and weights in registered memory; NULL where they are not in any.
  std::byte* rows_of(int rank) const { return group.scratch.rows_base[static_cast<size_t>(rank)]; }
  const float* weights_of(int rank) const { return group.scratch.weights_base[static_cast<size_t>(rank)]; }
};

// Returns where a call's receive rows lie in memory that peers reach, and access in place.
inline AllocationPlace place_of(const HostGroup& group, const MovementCall& call, const std::byte* rows) {
  return group.allocations.locate(rows, call.recv_rows * recv_row_bytes(call));
}

// Returns the address of the rows that the descriptor of `rank` names; NULL where they lie in no allocation of the group.
std::byte* registered_address(const HostGroup& group, int rank, const AllocationPlace& place, int64_t rows,
                              int64_t bytes_each);

// Finds each peer's receive rows and weights in registered memory; NULL where they are not in any.
void find_rows(HostGroup& group, const MovementCall& call);

// Behind the entry barrier of a call that makes its plan itself, so that all ranks take part. The group and the call must
// outlive the Movement.
Movement movement_of_own_plan(HostGroup& group, const MovementCall& call);

// Reports the kept rows of this rank's plan that lie in slots at or above N.
void report_rows_beyond(const Movement& movement);

// Begins the call and passes its entry barrier, with a descriptor whose plan id this fills in. The group and the call must
// outlive the Movement.
Movement begin_movement(HostGroup& group, const MovementCall& call, CallDescriptor descriptor);

} // namespace epx::host
