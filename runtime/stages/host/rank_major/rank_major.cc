// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/host/rank_major/rank_major.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>

#include "runtime/handle_checksum.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/layout/rank_major.h"
#include "runtime/layout/slots.h"
#include "runtime/stages/host/host_stages.h"
#include "runtime/stages/host/movement.h"
#include "runtime/stages/host/rows/row_sender.h"
#include "runtime/stages/host/rows/staging.h"
#include "runtime/stages/reports.h"

namespace epx::host {
namespace {

// One dispatch_rank_major in progress.
template <typename Format>
class RankMajorDispatch {
public:
  RankMajorDispatch(HostGroup& group, const DispatchRankMajorCall& call)
      : group_(group), call_(call), shape_(group.context.shape), layout_(group.context.layout), window_(group.window),
        staging_(group), plan_(call.plan, make_handle_layout(group.context.shape, call.top_k)),
        rows_to_(group.scratch.rows_to) {
    std::fill(rows_to_.begin(), rows_to_.end(), RankMajorCounts{});
  }

  void run() {
    group_.protocol.begin(EPX_OP_DISPATCH_RANK_MAJOR);
    assign_rows();
    // The board is written before peers arrive and read before they may complete, as CallExchange does.
    for (int rank = 0; rank < shape_.num_ranks; ++rank)
      *counts_at(rank, window_.rank) = rows_to_[static_cast<size_t>(rank)];
    group_.protocol.arrive(describe(call_, call_.is_compact ? kNotRegistered : place_of(group_, call_, call_.recv_tokens)));
    find_rows(group_, call_);
    read_counts();
    RowSender<Format> sender(group_, call_, {call_.tokens, call_.sidecar, call_.sidecar_bytes}, Format(call_));
    for (int64_t token = 0; token < call_.num_tokens; ++token)
      send_token(sender, token);
    group_.protocol.complete();
    for (int source = 0; source < shape_.num_ranks; ++source)
      receive_rows(source);
    write_header();
  }

private:
  int64_t index_at(int64_t route) const {
    return call_.topk_idx_is_64 ? static_cast<const int64_t*>(call_.topk_idx)[route]
                                : static_cast<const int32_t*>(call_.topk_idx)[route];
  }
  RankMajorCounts* counts_at(int owner, int source) const {
    return window_.at<RankMajorCounts>(owner, layout_.board.offset + source * kExchangeRecordBytes);
  }

  // Gives each token of this rank its row on each rank that it goes to, and writes the routes into the handle memory.
  void assign_rows() {
    int64_t bad = 0;
    int64_t first_bad = -1;
    for (int64_t token = 0; token < call_.num_tokens; ++token) {
      Route* const routes = plan_.routes + token * call_.top_k;
      std::array<int32_t, kMaxTopK> kept_ranks; // ascending
      int num_kept = 0;
      for (int k = 0; k < call_.top_k; ++k) {
        const int64_t route = token * call_.top_k + k;
        const int64_t expert = index_at(route);
        routes[k] = {-1, -1, 0};
        if (expert < 0 || expert >= shape_.num_experts) {
          if (expert != -1 && bad++ == 0) first_bad = route;
          continue;
        }
        const int32_t rank = group_.experts.rank_of(static_cast<int>(expert));
        RankMajorCounts& counts = rows_to_[static_cast<size_t>(rank)];
        const auto before = std::find_if(routes, routes + k, [&](const Route& other) { return other.rank == rank; });
        if (before == routes + k) ++counts.rows;
        const int64_t row = counts.rows - 1;
        routes[k].rank = rank; // of dropped routes too, until the token is finished
        if (row >= call_.rows_per_source) {
          ++counts.dropped_routes;
          continue;
        }
        const auto slot = static_cast<int32_t>(window_.rank * call_.slots_per_source + row);
        routes[k].slot = encode_slot(slot, before == routes + k);
        if (before == routes + k) kept_ranks[static_cast<size_t>(num_kept++)] = rank;
      }
      std::sort(kept_ranks.begin(), kept_ranks.begin() + num_kept);
      for (int k = 0; k < call_.top_k; ++k) {
        Route& route = routes[k];
        if (decode_slot(route.slot) < 0) route.rank = -1;
        if (route.rank >= 0)
          route.rank_ordinal = static_cast<int32_t>(
              std::lower_bound(kept_ranks.begin(), kept_ranks.begin() + num_kept, route.rank) - kept_ranks.begin());
      }
    }
    if (bad > 0)
      group_.status.record(bad_index_event(group_.protocol.name(), bad, index_at(first_bad), first_bad / call_.top_k,
                                           first_bad % call_.top_k, shape_.num_experts));
  }

  // Learns how many rows each source has for this rank.
  void read_counts() {
    int64_t dropped = 0;
    int64_t most_rows = 0;
    int64_t all_kept = 0;
    for (int source = 0; source < shape_.num_ranks; ++source) {
      const RankMajorCounts counts = *counts_at(window_.rank, source);
      const int64_t most_dropped = (counts.rows - call_.rows_per_source) * call_.top_k;
      if (counts.rows < 0 || counts.rows > shape_.max_tokens_per_rank || counts.dropped_routes < 0 ||
          counts.dropped_routes > std::max<int64_t>(most_dropped, 0))
        group_.protocol.fail_as_damaged(fmt::format("rank {} seems to have {} tokens for this rank, and {} dropped routes",
                                                    source, counts.rows, counts.dropped_routes));
      const int64_t kept = std::min(counts.rows, call_.rows_per_source);
      plan_.source_rows[source] = {static_cast<int32_t>(kept), call_.is_compact ? static_cast<int32_t>(all_kept) : 0};
      all_kept += kept;
      if (call_.counts_are_64)
        static_cast<int64_t*>(call_.counts)[source] = kept;
      else
        static_cast<int32_t*>(call_.counts)[source] = static_cast<int32_t>(kept);
      dropped += counts.dropped_routes;
      most_rows = std::max(most_rows, counts.rows);
    }
    if (dropped > 0)
      group_.status.record(too_few_rows_event(group_.protocol.name(), dropped, call_.rows_per_source, most_rows));
  }

  // Stores the token, and which experts it goes to, on each rank that keeps it.
  void send_token(RowSender<Format>& sender, int64_t token) const {
    const Route* const routes = plan_.routes + token * call_.top_k;
    for (int first = 0; first < call_.top_k; ++first) {
      const auto [slot, rank, rank_ordinal] = routes[first];
      if (slot < 0) continue; // not kept, or not the first of its row
      sender.store_in_place(token, rank, slot);
      sender.stage(token, rank, slot);
      RankMajorRoute* const sent = staging_.routes(rank, slot, call_.top_k);
      const auto partial_row = static_cast<int32_t>(partial_staging_row(shape_, token, call_.top_k, rank_ordinal));
      for (int k = 0; k < call_.top_k; ++k) {
        const int64_t route = token * call_.top_k + k;
        const bool goes_there = routes[k].rank == rank;
        sent[k] = {goes_there ? static_cast<int32_t>(index_at(route) - group_.experts.first_expert(rank)) : -1,
                   goes_there && call_.topk_weights != nullptr ? call_.topk_weights[route] : 0.0f, partial_row, 0};
      }
    }
  }

  void receive_rows(int source) {
    const int64_t first_slot = source * call_.slots_per_source;
    const auto [rows, begin] = plan_.source_rows[source];
    const int64_t first_row = call_.is_compact ? begin : source * call_.rows_per_source;
    const RowReceiver<Format> staged(group_, call_);
    const ReceivedRows<Format> received(call_);
    for (int64_t slot = first_slot; slot < first_slot + rows; ++slot) {
      const int64_t row = first_row + slot - first_slot;
      receive_routes(source, slot, row);
      received.store(row, staged.row(slot, slot), staged.sidecar(slot));
    }
    for (int64_t slot = first_slot + rows; slot < first_slot + call_.slots_per_source; ++slot)
      write_record(slot, kPadRecord, 0);
  }

  // `row`: of the receive tensors.
  void receive_routes(int source, int64_t slot, int64_t row) {
    const RankMajorRoute* const routes = staging_.routes(window_.rank, slot, call_.top_k);
    uint64_t mask = 0;
    for (int k = 0; k < call_.top_k; ++k) {
      const int32_t expert = routes[k].expert;
      if (expert < -1 || expert >= group_.experts.num_local_experts(window_.rank))
        group_.protocol.fail_as_damaged(fmt::format("route {} of row {} from rank {} seems to go to local expert {}", k,
                                                    slot - source * call_.slots_per_source, source, expert));
      if (expert >= 0) mask |= uint64_t{1} << k;
      const int64_t index = row * call_.top_k + k;
      if (call_.recv_topk_idx_is_64)
        static_cast<int64_t*>(call_.recv_topk_idx)[index] = expert;
      else
        static_cast<int32_t*>(call_.recv_topk_idx)[index] = expert;
      if (call_.recv_weights != nullptr) call_.recv_weights[index] = routes[k].weight;
    }
    const PartialRow partial = partial_row_at(shape_, routes[0].partial_row, call_.top_k);
    const SlotRecord record{partial.token,
                            -1,
                            static_cast<uint16_t>(source),
                            static_cast<uint8_t>(mask == 0 ? 0 : __builtin_ctzll(mask)),
                            1,
                            static_cast<uint8_t>(partial.rank_ordinal & 0x7f)};
    if (mask == 0 || !is_sound(record, shape_, call_.top_k, 0))
      group_.protocol.fail_as_damaged(fmt::format("row {} from rank {} seems to be token {}, with routes {:#x}, order {}",
                                                  slot - source * call_.slots_per_source, source, record.token, mask,
                                                  partial.rank_ordinal));
    write_record(slot, record, mask);
  }

  void write_record(int64_t slot, const SlotRecord& record, uint64_t mask) {
    plan_.slot_records[slot] = record;
    if (call_.top_k > 1)
      plan_.masks(call_.num_slots(shape_))[slot] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32), 0};
  }

  void write_header() {
    HandleHeader header{};
    header.magic = kHandleMagic;
    header.group_id = group_.context.group_id;
    header.plan_id = group_.protocol.sequence();
    header.num_tokens = call_.num_tokens;
    header.rows_in_use = call_.num_slots(shape_);
    header.top_k = static_cast<uint16_t>(call_.top_k);
    header.is_compact = call_.is_compact ? 1 : 0;
    header.alignment = call_.alignment;
    header.rank = window_.rank;
    header.rows_per_source = call_.rows_per_source;
    header.checksum = header_checksum(header);
    if (group_.context.checks_handle_mem)
      header.body_checksum = body_checksum(call_.plan, header, make_handle_layout(shape_, call_.top_k), group_.context);
    *plan_.header = header;
  }

  HostGroup& group_;
  const DispatchRankMajorCall& call_;
  const GroupShape& shape_;
  const WindowLayout& layout_;
  const PeerWindow& window_;
  ScatterStaging staging_;
  HandleWriter plan_;
  std::vector<RankMajorCounts>& rows_to_; // [P]
};

} // namespace

void dispatch_rank_major(HostGroup& group, const DispatchRankMajorCall& call) {
  with_row_format(call, [&]<typename Format>(std::type_identity<Format>) { RankMajorDispatch<Format>(group, call).run(); });
}

void send_rank_major_weights_home(const Movement& movement, const float* weights) {
  const MovementCall& call = movement.call;
  const GroupShape& shape = movement.group.context.shape;
  const RankMajorMask* const masks = movement.plan.masks(call.num_slots(shape));
  const GatherStaging staging(movement.group);
  for (int source = 0; source < shape.num_ranks; ++source) {
    if (!movement.is_active(source)) continue;
    const int64_t first_slot = source * call.slots_per_source;
    for (int64_t slot = first_slot; slot < first_slot + movement.rows_of_source(source); ++slot) {
      const SlotRecord& record = movement.plan.slot_records[slot];
      if (!movement.limits.has_origin(record)) continue;
      const uint64_t mask = call.top_k > 1 ? masks[slot].low | uint64_t{masks[slot].high} << 32 : 1;
      float* const home = staging.weights(source) + route_index(record.token, call.top_k, 0);
      for (int k = 0; k < call.top_k; ++k)
        if ((mask >> k & 1) != 0) home[k] = weights[movement.row_of_slot(slot) * call.top_k + k];
    }
  }
}

void collect_rank_major_weights(const Movement& movement, float* out) {
  const MovementCall& call = movement.call;
  const float* const staged = GatherStaging(movement.group).weights(movement.group.window.rank);
  for (int64_t i = 0; i < call.num_tokens * call.top_k; ++i) {
    const Route& route = movement.plan.routes[i];
    const bool is_kept = movement.limits.slot_of_kept(route) >= 0 && movement.is_active(route.rank);
    out[i] = is_kept ? staged[i] : 0.0f;
  }
}

} // namespace epx::host
