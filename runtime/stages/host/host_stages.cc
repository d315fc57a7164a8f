// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/host/host_stages.h"

#include <algorithm>
#include <string>

#include <fmt/format.h>

#include "base/names.h"
#include "runtime/handle_checksum.h"
#include "runtime/stages/reports.h"

namespace epx::host {

HostStages::HostStages(const GroupContext& context, PeerWindow window, const Allocations& allocations,
                       CallProtocol& protocol, StatusBoard& status)
    : context_(context), window_(window), allocations_(allocations), protocol_(protocol),
      status_(status), experts_{context.shape.num_experts, context.shape.num_ranks}, scratch_(context.shape) {}

int64_t HostStages::row_bytes(const MovementCall& call) const {
  return call.hidden * element_bytes(call.dtype);
}

// Reports the routes of this rank whose slot is at or above N.
void HostStages::report_rows_beyond(const MovementCall& call, const HandleReader& plan, const HandleLimits& limits) {
  const int num_local_experts = experts_.num_local_experts(window_.rank);
  int64_t beyond = 0;
  HandleLimits::Zone zone{};
  for (int expert = 0; expert < num_local_experts; ++expert) {
    zone = limits.zone(plan.zone_begin, plan.zone_rows, expert, zone.end);
    beyond += std::max<int64_t>(0, zone.end_of_rows - std::max(call.recv_rows, zone.begin));
  }
  if (beyond == 0) return;
  status_.record(too_few_rows_event(protocol_.name(), beyond, call.recv_rows, plan.header->rows_in_use));
}

// Makes this rank's call descriptor, which names the allocations in which its receive rows (and weights) lie, if they lie in
// any: peers access those in place.
CallDescriptor HostStages::make_descriptor(const MovementCall& call, const std::byte* rows, const float* weights) const {
  CallDescriptor descriptor{};
  descriptor.rows_allocation = -1;
  descriptor.weights_allocation = -1;
  const int64_t bytes = call.recv_rows * row_bytes(call);
  if (const auto place = allocations_.locate(rows, bytes)) {
    descriptor.rows_allocation = place->allocation;
    descriptor.rows_offset = place->offset;
  }
  const int64_t weight_bytes = call.recv_rows * static_cast<int64_t>(sizeof(float));
  if (const auto place = allocations_.locate(reinterpret_cast<const std::byte*>(weights), weight_bytes)) {
    descriptor.weights_allocation = place->allocation;
    descriptor.weights_offset = place->offset;
  }
  return descriptor;
}

// Finds each peer's receive rows and weights in registered memory; NULL where they are not in any.
void HostStages::find_rows(const MovementCall& call) {
  for (int rank = 0; rank < window_.num_ranks; ++rank) {
    const CallDescriptor& descriptor = protocol_.descriptor_of(rank);
    const auto index = static_cast<size_t>(rank);
    scratch_.rows_base[index] = registered_address(rank, {descriptor.rows_allocation, descriptor.rows_offset},
                                                   descriptor.recv_rows, row_bytes(call));
    scratch_.weights_base[index] = reinterpret_cast<const float*>(registered_address(
        rank, {descriptor.weights_allocation, descriptor.weights_offset}, descriptor.recv_rows, sizeof(float)));
  }
}

// Returns the address of the rows that the descriptor of `rank` names; NULL where they lie in no allocation of the group.
std::byte* HostStages::registered_address(int rank, const AllocationPlace& place, int64_t rows, int64_t row_bytes) {
  if (place.allocation == -1) return nullptr;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(rows, row_bytes, &bytes) || !allocations_.contains(place, bytes))
    protocol_.fail_as_damaged(fmt::format("rank {} seems to pass {} rows of {} bytes at byte {} of allocation {}", rank,
                                          rows, row_bytes, place.offset, place.allocation));
  return allocations_.peer_address(rank, place);
}

uint64_t HostStages::checksum_of_body(const std::byte* handle_mem, const HandleHeader& header) const {
  return body_checksum(handle_mem, header, make_handle_layout(context_.shape, header.top_k), context_);
}

bool HostStages::is_body_intact(const std::byte* handle_mem, const HandleHeader& header) const {
  return !context_.checks_handle_mem || checksum_of_body(handle_mem, header) == header.body_checksum;
}

HostStages::Movement HostStages::begin_movement(const MovementCall& call, CallDescriptor descriptor) {
  const HandleReader plan(call.handle_mem, make_handle_layout(context_.shape, call.top_k));
  const HandleLimits limits(context_.shape, call.top_k);
  std::string why = why_unusable(*plan.header, {call.top_k, call.alignment, call.num_tokens}, context_);
  if (why.empty() && !is_body_intact(call.handle_mem, *plan.header)) why = why_body_unusable();
  const bool usable = why.empty();

  descriptor.top_k = call.top_k;
  descriptor.alignment = call.alignment;
  descriptor.hidden = call.hidden;
  descriptor.dtype = call.dtype;
  descriptor.plan_id = usable ? plan.header->plan_id : 0;
  descriptor.recv_rows = call.recv_rows;
  protocol_.begin(call.operation);
  protocol_.arrive(descriptor);

  if (!usable) status_.record(unusable_handle_event(protocol_.name(), why));
  int mismatched_rank = -1; // a rank whose handle memory comes from another prepare
  for (int rank = 0; rank < window_.num_ranks; ++rank) {
    const uint64_t plan_id = protocol_.descriptor_of(rank).plan_id;
    const bool same_plan = usable && plan_id == descriptor.plan_id;
    scratch_.active[static_cast<size_t>(rank)] = same_plan ? 1 : 0;
    if (usable && plan_id != 0 && !same_plan && mismatched_rank < 0) mismatched_rank = rank;
  }
  if (mismatched_rank >= 0)
    status_.record(plan_mismatch_event(protocol_.name(), descriptor.plan_id,
                                       protocol_.descriptor_of(mismatched_rank).plan_id, mismatched_rank));
  if (!usable) return {plan, limits, false};
  report_rows_beyond(call, plan, limits);
  return {plan, limits, true};
}

} // namespace epx::host
