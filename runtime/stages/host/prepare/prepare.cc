// SPDX-License-Identifier: Apache-2.0
// prepare is a count exchange: ranks exchange their route counts, and each computes its own slots from the P x E matrix by a
// stable counting sort. Then each stores the origins of the slots into the receivers' windows.

#include "runtime/stages/host/prepare/prepare.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>

#include "runtime/handle_checksum.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/layout/slots.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/host/host_stages.h"
#include "runtime/stages/reports.h"

namespace epx::host {
namespace {

int64_t index_at(const PrepareCall& call, int64_t route) {
  return call.topk_idx_is_64 ? static_cast<const int64_t*>(call.topk_idx)[route]
                             : static_cast<const int32_t*>(call.topk_idx)[route];
}

void store_count(const PrepareCall& call, void* tensor, int64_t index, int64_t value) {
  if (call.counts_are_64)
    static_cast<int64_t*>(tensor)[index] = value;
  else
    static_cast<int32_t*>(tensor)[index] = static_cast<int32_t>(value);
}

const int32_t* counts_of(const HostGroup& group, int rank) {
  // There are two matrices, by parity of the call: a peer that is already in call n + 1 writes the other one.
  const int64_t parity = static_cast<int64_t>(group.protocol.sequence() & 1);
  const int64_t row = parity * group.window.num_ranks + rank;
  return group.window.local<int32_t>(group.context.layout.counts.offset) + row * group.context.shape.num_experts;
}

void count_routes(HostGroup& group, const PrepareCall& call) {
  std::fill(group.scratch.route_counts.begin(), group.scratch.route_counts.end(), 0);
  const int64_t num_routes = call.num_tokens * call.top_k;
  int64_t bad = 0;
  int64_t first_bad = -1;
  for (int64_t route = 0; route < num_routes; ++route) {
    const int64_t expert = index_at(call, route);
    if (expert >= 0 && expert < group.context.shape.num_experts) {
      ++group.scratch.route_counts[static_cast<size_t>(expert)];
    } else if (expert != -1) {
      if (bad++ == 0) first_bad = route;
    }
  }
  if (bad == 0) return;
  group.status.record(bad_index_event(group.protocol.name(), bad, index_at(call, first_bad), first_bad / call.top_k,
                                      first_bad % call.top_k, group.context.shape.num_experts));
}

void store_counts(const HostGroup& group) {
  const auto offset =
      reinterpret_cast<const std::byte*>(counts_of(group, group.window.rank)) - group.window.local<std::byte>(0);
  const size_t bytes = group.scratch.route_counts.size() * sizeof(int32_t);
  for (int peer = 0; peer < group.window.num_ranks; ++peer)
    std::memcpy(group.window.at<int32_t>(peer, offset), group.scratch.route_counts.data(), bytes);
}

// Slots follow from the counts, so a peer's counts are checked against what it can have.
void require_sound_counts(const HostGroup& group, const PrepareCall& call) {
  const int64_t max_routes = static_cast<int64_t>(group.context.shape.max_tokens_per_rank) * call.top_k;
  for (int source = 0; source < group.context.shape.num_ranks; ++source) {
    int64_t routes = 0;
    for (int expert = 0; expert < group.context.shape.num_experts; ++expert) {
      const int32_t count = counts_of(group, source)[expert];
      routes += count;
      if (count < 0 || routes > max_routes)
        group.protocol.fail_as_damaged(
            fmt::format("rank {} seems to have {} routes to expert {}, and {} up to there, of {} at most", source, count,
                        expert, routes, max_routes));
    }
  }
}

ZoneRule zone_rule(const GroupShape& shape, const PrepareCall& call) {
  return {usable_slots(shape.max_recv_tokens, call.alignment), call.alignment, call.zone_stride};
}

// Gives each route of this rank its slot, writes the routes into the handle memory, and the slots' origins into the windows
// of the ranks that own the slots.
void assign_own_slots(HostGroup& group, const PrepareCall& call, HandleWriter& plan, int64_t& dropped) {
  const GroupShape& shape = group.context.shape;
  const ZoneRule zones = zone_rule(shape, call);
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    int64_t zone = 0;
    for (int expert = group.experts.first_expert(rank); expert < group.experts.first_expert(rank + 1); ++expert) {
      int64_t demand = 0;
      for (int source = 0; source < shape.num_ranks; ++source) {
        if (source == group.window.rank) group.scratch.next_slot[static_cast<size_t>(expert)] = zone + demand;
        demand += counts_of(group, source)[expert];
      }
      group.scratch.end_of_slots[static_cast<size_t>(expert)] = zones.end(zone);
      zone += zones.rows(demand);
    }
  }

  dropped = 0;
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    Route* routes = plan.routes + token * call.top_k;
    std::array<int32_t, kMaxTopK> ranks; // ranks that this token goes to, then ascending and without duplicates
    int num_ranks = 0;
    for (int k = 0; k < call.top_k; ++k) {
      const int64_t expert = index_at(call, token * call.top_k + k);
      routes[k] = {-1, -1, 0};
      if (expert < 0 || expert >= shape.num_experts) continue;
      const int64_t slot = group.scratch.next_slot[static_cast<size_t>(expert)]++;
      if (slot >= group.scratch.end_of_slots[static_cast<size_t>(expert)]) {
        ++dropped;
        continue;
      }
      routes[k] = {static_cast<int32_t>(slot), group.experts.rank_of(static_cast<int>(expert)), 0};
      ranks[static_cast<size_t>(num_ranks++)] = routes[k].rank;
    }
    std::sort(ranks.begin(), ranks.begin() + num_ranks);
    const auto ranks_end = std::unique(ranks.begin(), ranks.begin() + num_ranks);

    // The loop goes from the last k to the first, so that each slot can name the next one of its token on the same rank.
    std::array<int32_t, kMaxTopK> next_slot;
    next_slot.fill(-1);
    std::array<SlotRecord*, kMaxTopK> first_record{};
    for (int k = call.top_k - 1; k >= 0; --k) {
      Route& route = routes[k];
      if (route.slot < 0) continue;
      route.rank_ordinal = static_cast<int32_t>(std::lower_bound(ranks.begin(), ranks_end, route.rank) - ranks.begin());
      const auto rank_ordinal = static_cast<size_t>(route.rank_ordinal);
      SlotRecord* record =
          &group.window.at<LlSlotRecord>(route.rank, group.context.layout.ll_slot_records.offset)[route.slot].record;
      *record = {static_cast<int32_t>(token),
                 next_slot[rank_ordinal],
                 static_cast<uint16_t>(group.window.rank),
                 static_cast<uint8_t>(k),
                 0,
                 static_cast<uint8_t>(rank_ordinal & 0x7f)};
      next_slot[rank_ordinal] = route.slot;
      first_record[rank_ordinal] = record;
    }
    for (auto rank = ranks.begin(); rank != ranks_end; ++rank)
      first_record[static_cast<size_t>(rank - ranks.begin())]->first = 1;
  }
}

// Writes the zones of this rank's experts, and the outputs that follow from the counts alone.
void write_zone_tables(const HostGroup& group, const PrepareCall& call, HandleWriter& plan, int64_t* info) {
  const ZoneRule zones = zone_rule(group.context.shape, call);
  const int64_t usable = zones.usable;
  const int first = group.experts.first_expert(group.window.rank);
  const int num_local_experts = group.experts.num_local_experts(group.window.rank);
  int64_t zone = 0;
  int64_t total_demand = 0;
  int64_t total_kept = 0;
  for (int expert = 0; expert < num_local_experts; ++expert) {
    int64_t demand = 0;
    for (int source = 0; source < group.context.shape.num_ranks; ++source)
      demand += counts_of(group, source)[first + expert];
    const int64_t kept = zones.kept(zone, zone, demand);
    plan.zone_begin[expert] = static_cast<int32_t>(std::min(zone, usable));
    plan.zone_rows[expert] = static_cast<int32_t>(kept);
    store_count(call, call.counts, expert, kept);
    store_count(call, call.offsets, expert, std::min(zone, usable));
    zone += zones.rows(demand);
    total_demand += demand;
    total_kept += kept;
  }
  const int64_t rows_in_use = std::min(zone, usable);
  plan.zone_begin[num_local_experts] = static_cast<int32_t>(rows_in_use);
  plan.header->rows_in_use = rows_in_use;
  store_count(call, call.offsets, num_local_experts, rows_in_use);
  info[0] = total_demand;
  info[1] = total_kept;
  info[2] = total_demand - total_kept;
  info[4] = zone;
}

// Copies the slot records that the peers stored in the window into the handle memory; pads get kPadRecord.
void take_slot_records(const HostGroup& group, const PrepareCall& call, HandleWriter& plan) {
  const auto* window_records = group.window.local<LlSlotRecord>(group.context.layout.ll_slot_records.offset);
  for (int expert = 0; expert < group.experts.num_local_experts(group.window.rank); ++expert) {
    const int64_t end_of_rows = plan.zone_begin[expert] + plan.zone_rows[expert];
    for (int64_t slot = plan.zone_begin[expert]; slot < end_of_rows; ++slot) {
      const SlotRecord record = window_records[slot].record;
      if (!is_sound(record, group.context.shape, call.top_k, plan.header->rows_in_use))
        group.protocol.fail_as_damaged(
            fmt::format("the record of slot {} says rank {}, token {}, k {}, order {}, next slot {}", slot, record.source,
                        record.token, record.k, int{record.rank_ordinal}, record.next_slot));
      plan.slot_records[slot] = record;
    }
    std::fill(plan.slot_records + end_of_rows, plan.slot_records + plan.zone_begin[expert + 1], kPadRecord);
  }
}

void copy_outputs(const HostGroup& group, const PrepareCall& call, const HandleWriter& plan) {
  const GroupShape& shape = group.context.shape;
  if (call.global_counts != nullptr)
    for (int rank = 0; rank < shape.num_ranks; ++rank)
      for (int expert = 0; expert < shape.num_experts; ++expert)
        store_count(call, call.global_counts, static_cast<int64_t>(rank) * shape.num_experts + expert,
                    counts_of(group, rank)[expert]);
  if (call.slot != nullptr)
    for (int64_t route = 0; route < call.num_tokens * call.top_k; ++route)
      call.slot[route] = plan.routes[route].slot;
  if (call.slot_origin != nullptr) {
    for (int64_t slot = 0; slot < shape.max_recv_tokens; ++slot) {
      int32_t* origin = call.slot_origin + 3 * slot;
      const SlotRecord& record = slot < plan.header->rows_in_use ? plan.slot_records[slot] : kPadRecord;
      origin[0] = record.is_pad() ? -1 : record.source;
      origin[1] = record.token;
      origin[2] = record.is_pad() ? -1 : record.k;
    }
  }
}

} // namespace

PrepareSteps::PrepareSteps(HostGroup& group, const PrepareCall& call)
    : group_(group), call_(call), layout_(make_handle_layout(group.context.shape, call.top_k)),
      plan_(call.handle_mem, layout_) {}

void PrepareSteps::publish_counts() {
  count_routes(group_, call_);
  store_counts(group_);
}

void PrepareSteps::assign_slots() {
  require_sound_counts(group_, call_);
  *plan_.header = {};
  write_zone_tables(group_, call_, plan_, info_.data());
  assign_own_slots(group_, call_, plan_, info_[3]);
}

void PrepareSteps::deliver() {
  take_slot_records(group_, call_, plan_);

  HandleHeader header{};
  header.magic = kHandleMagic;
  header.group_id = group_.context.group_id;
  header.plan_id = group_.protocol.sequence();
  header.num_tokens = call_.num_tokens;
  header.rows_in_use = plan_.header->rows_in_use;
  header.top_k = static_cast<uint16_t>(call_.top_k);
  header.alignment = call_.alignment;
  header.rank = group_.window.rank;
  header.rows_per_source = kExpertMajor;
  header.checksum = header_checksum(header);
  if (group_.context.checks_handle_mem)
    header.body_checksum = body_checksum(call_.handle_mem, header, layout_, group_.context);
  *plan_.header = header;

  if (call_.info != nullptr) std::copy(info_.begin(), info_.end(), call_.info);
  copy_outputs(group_, call_, plan_);
  if (group_.context.overflow == EPX_OVERFLOW_ERROR && info_[2] > 0)
    group_.status.record(overflow_event(group_.protocol.name(), {info_[0], info_[2], info_[4], call_.zone_stride},
                                        group_.window.rank, group_.context.shape.max_recv_tokens));
}

void prepare(HostGroup& group, const PrepareCall& call) {
  PrepareSteps steps(group, call);
  group.protocol.begin(EPX_OP_PREPARE);
  steps.publish_counts();
  group.protocol.arrive(describe(call));
  steps.assign_slots();
  group.protocol.complete();
  steps.deliver();
}

} // namespace epx::host
