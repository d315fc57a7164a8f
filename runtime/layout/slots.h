// SPDX-License-Identifier: Apache-2.0
// Every implementation of the stages shares this slot arithmetic: which rank owns an expert, where a zone starts, where a
// staged row lies. These are plain constexpr functions and PODs, for host and device.
#pragma once

#include <cstdint>

#include "runtime/layout/window_layout.h"

namespace epx {

// Ranks own contiguous blocks of experts; the first num_experts % num_ranks ranks own one more.
struct ExpertBlocks {
  int num_experts;
  int num_ranks;

  constexpr int first_expert(int rank) const {
    const int extra = num_experts % num_ranks;
    return num_experts / num_ranks * rank + (rank < extra ? rank : extra);
  }
  constexpr int num_local_experts(int rank) const { return first_expert(rank + 1) - first_expert(rank); }
  constexpr int rank_of(int expert) const {
    const int base = num_experts / num_ranks;
    const int extra = num_experts % num_ranks;
    const int in_larger_blocks = extra * (base + 1);
    return expert < in_larger_blocks ? expert / (base + 1) : extra + (expert - in_larger_blocks) / base;
  }
};

// An alignment of 0 means 1.
constexpr int effective_alignment(int alignment) {
  return alignment == 0 ? 1 : alignment;
}

// R_a of the contract: only these slots exist, and zones are cut off beyond them.
constexpr int64_t usable_slots(int64_t max_recv_tokens, int alignment) {
  return max_recv_tokens / alignment * alignment;
}

// A zone of `demand` routes takes this many rows.
constexpr int64_t zone_rows(int64_t demand, int alignment) {
  return (demand + alignment - 1) / alignment * alignment;
}

// Where the zones of a rank lie: each behind the one before, or a stride apart. Those that are have room in the usable slots.
struct ZoneRule {
  int64_t usable; // usable_slots()
  int alignment;
  int64_t stride; // 0: behind each other

  // Returns the rows from the begin of a zone of `demand` routes to that of the next.
  constexpr int64_t rows(int64_t demand) const { return stride > 0 ? stride : zone_rows(demand, alignment); }
  // Returns the end of the slots that the zone which begins at `begin` may have: routes beyond it are dropped.
  constexpr int64_t end(int64_t begin) const { return stride > 0 ? begin + stride : usable; }
  // Returns how many of `routes` routes are kept, the first of which would have the slot `first` in that zone.
  constexpr int64_t kept(int64_t begin, int64_t first, int64_t routes) const {
    const int64_t room = end(begin) - first;
    return room < 0 ? 0 : room < routes ? room : routes;
  }
};

// Says where the row in one slot comes from, and which other slot of this rank holds the same token. In the routing all-gather
// and in the rank-major layout the rank of the slot makes it; otherwise the source rank stores it into that rank's window.
struct SlotRecord {
  static constexpr uint16_t kNoSource = 0xffff;

  int32_t token;
  int32_t next_slot; // slot of the token's next k on this rank; -1: the last
  uint16_t source;   // rank; kNoSource: a pad
  uint8_t k;
  uint8_t first : 1;        // 1: the token's lowest k on this rank, whose slot heads the chain through next_slot
  uint8_t rank_ordinal : 7; // index of this rank among the ranks that the token goes to, ascending

  constexpr bool is_pad() const { return source == kNoSource; }
};
static_assert(sizeof(SlotRecord) == 12 && kMaxTopK <= 128);

// Returns whether a record that a peer stored can be one of a kept route: no field of it leads outside of the group's tables.
// Which slots a token's chain really has is not known here.
constexpr bool is_sound(const SlotRecord& record, const GroupShape& shape, int top_k, int64_t rows_in_use) {
  return record.source < shape.num_ranks && record.token >= 0 && record.token < shape.max_tokens_per_rank &&
         record.k < top_k && record.rank_ordinal < top_k && record.rank_ordinal < shape.num_ranks &&
         record.next_slot >= -1 && record.next_slot < rows_in_use;
}

constexpr SlotRecord kPadRecord{-1, -1, SlotRecord::kNoSource, 0, 0, 0};

// Between kernels a slot record travels as an LL packet.
struct alignas(16) LlSlotRecord {
  SlotRecord record;
  Epoch epoch;
};
static_assert(sizeof(LlSlotRecord) == kLlSlotRecordBytes);

// A route is one (token, k) pair as its home rank sees it, before call-time drops.
struct Route {
  int32_t slot;         // on `rank`; -1: masked or dropped; rank-major: encode_slot() of it (rank_major.h)
  int32_t rank;         // owner of the expert; -1: masked or dropped
  int32_t rank_ordinal; // index of `rank` among the ranks that the token goes to, ascending
};

// Returns the row of the receiver's scatter staging for a token of rank `source` whose lowest-k slot there is first_slot.
constexpr int64_t scatter_staging_row(const WindowLayout& layout, const GroupShape& shape, int source, int64_t token,
                                      int64_t first_slot) {
  return layout.scatter_by_token ? source * static_cast<int64_t>(shape.max_tokens_per_rank) + token : first_slot;
}

// Returns the row of the home rank's gather staging for the partial row of a token from the rank with this rank ordinal
// (precisions wire and node, and the rank-major layout).
constexpr int64_t partial_staging_row(const GroupShape& shape, int64_t token, int top_k, int rank_ordinal) {
  const int ranks = top_k < shape.num_ranks ? top_k : shape.num_ranks;
  return token * ranks + rank_ordinal;
}

// Returns the index of a route in tensors and tables [T, K]. In precision exact it is the row of gather staging, too, and in
// all precisions the index of a route's weight in gather_weights.
constexpr int64_t route_index(int64_t token, int top_k, int k) {
  return token * top_k + k;
}

// These return the index of an LL packet in its region of LL staging; for a chunk, that of its first packet. `parity` is that
// of the call. In scatter the sidecar's chunks follow those that the row may have.
constexpr int64_t ll_scatter_packet(const WindowLayout& layout, const GroupShape& shape, int64_t parity, int source,
                                    int64_t token, int64_t chunk) {
  const int64_t row = (parity * shape.num_ranks + source) * layout.ll_tokens + token;
  return (row * layout.ll_chunks + chunk) * kLlChunkPackets;
}
constexpr int64_t ll_gather_packet(const WindowLayout& layout, const GroupShape& shape, int64_t parity, int64_t token,
                                   int rank_ordinal, int64_t chunk) {
  const int64_t ranks = shape.max_top_k < shape.num_ranks ? shape.max_top_k : shape.num_ranks;
  const int64_t row = (parity * layout.ll_tokens + token) * ranks + rank_ordinal;
  return (row * layout.ll_row_chunks + chunk) * kLlChunkPackets;
}
constexpr int64_t ll_scatter_weight(const WindowLayout& layout, const GroupShape& shape, int64_t parity, int source,
                                    int64_t token, int k) {
  return ((parity * shape.num_ranks + source) * layout.ll_tokens + token) * shape.max_top_k + k;
}
constexpr int64_t ll_gather_weight(const WindowLayout& layout, const GroupShape& shape, int64_t parity, int64_t token,
                                   int k) {
  return (parity * layout.ll_tokens + token) * shape.max_top_k + k;
}

} // namespace epx
