// SPDX-License-Identifier: Apache-2.0
// A rank-major plan gives each (token, rank) one slot: source * slots_per_source + row, where the source has at most
// slots_per_source rows, min(M, max_tokens_per_rank). A plan of that kind is a plan with one route for each (token, rank), so
// that the movements of the expert-major layout serve it; the other routes of the token to the rank are in RankMajorMask.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/layout/slots.h"
#include "runtime/layout/window_layout.h"

namespace epx {

constexpr int64_t kExpertMajor = -1; // takes the place of M in the expert-major layout
constexpr int64_t slots_per_source(const GroupShape& shape, int64_t rows_per_source) {
  return rows_per_source < shape.max_tokens_per_rank ? rows_per_source : shape.max_tokens_per_rank;
}
// Several routes of a token to one rank share a row, and so a slot. These two are the code of Route::slot in a rank-major plan:
// the first of those routes, which has the lowest k, has the slot itself, and the others a number below -1. So whoever looks
// for slots that are not negative finds each row once.
constexpr int32_t encode_slot(int32_t slot, bool is_first) {
  return is_first ? slot : -2 - slot;
}
// Returns the slot of a kept route, first or not; -1: the route is masked or dropped.
constexpr int32_t decode_slot(int32_t code) {
  return code < -1 ? -2 - code : code;
}

// Says which k of a row's token go to this rank. It takes the place of a SlotRecord, behind those of all slots; plans of top-1
// have none, as it would be 1.
struct RankMajorMask {
  uint32_t low, high; // bits of k
  uint32_t unused;
};
static_assert(sizeof(RankMajorMask) == sizeof(SlotRecord));

// What a rank keeps of a source. In a compact plan (EPX_ROWS_COMPACT) the rows of the sources follow each other in the receive
// tensors; in others the rows of a source begin at the source times M.
struct SourceRows {
  int32_t kept;
  int32_t begin; // compact: the row of the receive tensors where they begin; else 0
};

// A source rank stores this on the exchange board of each receiver: how many tokens it has for it, and how many routes those
// have that lie at or above M. Kernels store the same numbers in an LlPacket16, of which there are two, by parity of the call.
struct RankMajorCounts {
  int64_t rows;
  int64_t dropped_routes;
};
static_assert(2 * sizeof(LlPacket16) <= kExchangeRecordBytes && sizeof(RankMajorCounts) <= kExchangeRecordBytes);

// The token, and the ordinal of a rank among those that it goes to, of a row of gather staging: the inverse of
// partial_staging_row().
struct PartialRow {
  int32_t token;
  int32_t rank_ordinal;
};

constexpr PartialRow partial_row_at(const GroupShape& shape, int32_t staging_row, int top_k) {
  const int ranks = top_k < shape.num_ranks ? top_k : shape.num_ranks;
  return {staging_row / ranks, staging_row % ranks};
}

// A source sends this for each (row, k) of dispatch_rank_major beside the row; kernels send it as an LL packet. On the
// high-throughput path it lies in WindowLayout::rank_major_routes(). A later prepare may poll these words as slot records, and
// must find the epoch of an old call, not arbitrary data. So the epoch lies where an LlSlotRecord has one.
struct alignas(16) RankMajorRoute {
  int32_t expert;      // local on the receiver; -1: the route is masked or goes to another rank
  float weight;        // 0 where weights do not travel
  int32_t partial_row; // partial_staging_row() of the row's token
  Epoch epoch;         // of the call; kernels only
};
static_assert(sizeof(RankMajorRoute) == sizeof(LlSlotRecord) &&
              offsetof(RankMajorRoute, epoch) == offsetof(LlSlotRecord, epoch));

// Returns the index of a slot's routes [K] in the receiver's staging.
constexpr int64_t rank_major_route(int64_t slot, int top_k) {
  return slot * top_k;
}

} // namespace epx
