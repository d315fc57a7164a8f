// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/host/movement.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>

#include "runtime/handle_checksum.h"
#include "runtime/stages/reports.h"

namespace epx::host {
namespace {

// Returns why this call cannot use its handle memory; "" when it can.
std::string why_handle_unusable(const GroupContext& context, const MovementCall& call, const HandleHeader& header,
                                const HandleLayout& layout) {
  std::string why = why_unusable(header, {call.top_k, call.alignment, call.num_tokens, call.rows_per_source}, context);
  if (why.empty() && context.checks_handle_mem &&
      body_checksum(call.handle_mem, header, layout, context) != header.body_checksum)
    why = why_body_unusable();
  return why;
}

} // namespace

std::byte* registered_address(const HostGroup& group, int rank, const AllocationPlace& place, int64_t rows,
                              int64_t bytes_each) {
  if (place.allocation == kNotRegistered.allocation) return nullptr;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(rows, bytes_each, &bytes) || !group.allocations.contains(place, bytes))
    group.protocol.fail_as_damaged(fmt::format("rank {} seems to pass {} rows of {} bytes at byte {} of allocation {}",
                                               rank, rows, bytes_each, place.offset, place.allocation));
  return group.allocations.peer_address(rank, place);
}

void report_rows_beyond(const Movement& movement) {
  const HostGroup& group = movement.group;
  const int64_t recv_rows = movement.call.recv_rows;
  int64_t beyond = 0;
  HandleLimits::Zone zone{};
  for (int index = 0; index < movement.num_zones(); ++index) {
    zone = movement.zone(index, zone.end);
    beyond += std::max<int64_t>(0, zone.end_of_rows - std::max(recv_rows, zone.begin));
  }
  if (beyond == 0) return;
  group.status.record(too_few_rows_event(group.protocol.name(), beyond, recv_rows, movement.plan.header->rows_in_use));
}

void find_rows(HostGroup& group, const MovementCall& call) {
  for (int rank = 0; rank < group.window.num_ranks; ++rank) {
    const CallDescriptor& descriptor = group.protocol.descriptor_of(rank);
    const auto index = static_cast<size_t>(rank);
    group.scratch.rows_base[index] = registered_address(group, rank, {descriptor.rows_allocation, descriptor.rows_offset},
                                                        descriptor.recv_rows, recv_row_bytes(call));
    group.scratch.weights_base[index] = reinterpret_cast<const float*>(registered_address(
        group, rank, {descriptor.weights_allocation, descriptor.weights_offset}, descriptor.recv_rows, sizeof(float)));
  }
}

Movement movement_of_own_plan(HostGroup& group, const MovementCall& call) {
  const HandleReader plan(call.handle_mem, make_handle_layout(group.context.shape, call.top_k));
  std::fill(group.scratch.active.begin(), group.scratch.active.end(), uint8_t{1});
  find_rows(group, call);
  return {group, call, plan, HandleLimits(group.context.shape, call.top_k, call.num_slots(group.context.shape)), true};
}

Movement begin_movement(HostGroup& group, const MovementCall& call, CallDescriptor descriptor) {
  const HandleLayout layout = make_handle_layout(group.context.shape, call.top_k);
  const HandleReader plan(call.handle_mem, layout);
  const std::string why = why_handle_unusable(group.context, call, *plan.header, layout);
  const bool usable = why.empty();
  const Movement movement{group, call, plan,
                          HandleLimits(group.context.shape, call.top_k, call.num_slots(group.context.shape)), usable};

  descriptor.plan_id = usable ? plan.header->plan_id : 0;
  if (usable && movement.is_compact())
    descriptor.rows_allocation = descriptor.weights_allocation = kNotRegistered.allocation;
  group.protocol.begin(call.operation);
  group.protocol.arrive(descriptor);

  if (!usable) group.status.record(unusable_handle_event(group.protocol.name(), why));
  int mismatched_rank = -1; // a rank whose handle memory comes from another prepare
  for (int rank = 0; rank < group.window.num_ranks; ++rank) {
    const uint64_t plan_id = group.protocol.descriptor_of(rank).plan_id;
    const bool same_plan = usable && plan_id == descriptor.plan_id;
    group.scratch.active[static_cast<size_t>(rank)] = same_plan ? 1 : 0;
    if (usable && plan_id != 0 && !same_plan && mismatched_rank < 0) mismatched_rank = rank;
  }
  if (mismatched_rank >= 0)
    group.status.record(plan_mismatch_event(group.protocol.name(), descriptor.plan_id,
                                            group.protocol.descriptor_of(mismatched_rank).plan_id, mismatched_rank));
  if (!usable) return movement;
  report_rows_beyond(movement);
  find_rows(group, call);
  return movement;
}

} // namespace epx::host
