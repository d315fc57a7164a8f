// SPDX-License-Identifier: Apache-2.0
// HandleLimits has the bounds of the values in handle memory, for host and device. The caller owns its bytes, and anything may
// have been written over them: each value that becomes an index is checked here first. A damaged value then refers to another
// slot, rank or token of the group, or to none; it never leads out of bounds.
#pragma once

#include <cstdint>

#include "runtime/config.h"
#include "runtime/layout/rank_major.h"
#include "runtime/layout/slots.h"

namespace epx {

struct HandleLimits {
  int32_t num_slots; // R; of a rank-major plan those that it has
  int32_t num_ranks; // P
  int32_t max_tokens;
  int32_t top_k;             // K of the layer
  int32_t num_rank_ordinals; // number of ranks that a token can go to

  constexpr HandleLimits(const GroupShape& shape, int layer_top_k, int64_t slots)
      : num_slots(static_cast<int32_t>(slots)), num_ranks(shape.num_ranks), max_tokens(shape.max_tokens_per_rank),
        top_k(layer_top_k), num_rank_ordinals(layer_top_k < shape.num_ranks ? layer_top_k : shape.num_ranks) {}

  constexpr bool is_slot(int32_t slot) const { return is_below(slot, num_slots); }
  constexpr bool is_rank(int32_t rank) const { return is_below(rank, num_ranks); }
  // Returns whether a route was kept by prepare. Its rank ordinal has a check of its own, since few callers need it. `&`
  // evaluates both conditions: on a GPU no load of one field waits for the value of the other one.
  constexpr bool is_route(const Route& route) const {
    return (static_cast<int>(is_slot(route.slot)) & static_cast<int>(is_rank(route.rank))) != 0;
  }
  // Returns whether a record refers to a token, that is, its slot is no pad.
  constexpr bool has_origin(const SlotRecord& record) const {
    return is_rank(record.source) && is_below(record.token, max_tokens);
  }
  // Returns the slot of a route that was kept, also of one that shares the row of an earlier k; else -1.
  constexpr int32_t slot_of_kept(const Route& route) const {
    const int32_t slot = decode_slot(route.slot);
    return is_slot(slot) && is_rank(route.rank) ? slot : -1;
  }
  // Returns a source rank's number of rows in a rank-major plan.
  constexpr int64_t rows(const SourceRows& source, int64_t slots_per_source) const {
    return source.kept < 0 ? 0 : source.kept < slots_per_source ? source.kept : slots_per_source;
  }
  // Returns the row of the receive tensors of a compact plan that row `row` < slots_per_source of a source is.
  constexpr int64_t compact_row(const SourceRows& source, int64_t row, int64_t slots_per_source) const {
    const int64_t last_begin = num_slots - slots_per_source; // where each source has as many rows as it can
    return (source.begin < 0 ? 0 : source.begin < last_begin ? source.begin : last_begin) + row;
  }
  constexpr int rank_ordinal(int32_t rank_ordinal) const { return clamp(rank_ordinal, num_rank_ordinals); }
  constexpr int k(int32_t k) const { return clamp(k, top_k); }

  // A zone's slots are these: its rows come first, then its pads. Others may follow up to the next zone.
  struct Zone {
    int64_t begin, end_of_rows, end;
  };
  // `from` is the end of the zone before this one, which this one does not overlap; callers to whom that does not matter pass
  // 0.
  constexpr Zone zone(const int32_t* zone_begin, const int32_t* rows_of_zones, int local_expert, int64_t from,
                      int alignment) const {
    const int64_t begin = between(zone_begin[local_expert], from);
    const int64_t end_of_rows = between(begin + rows_of_zones[local_expert], begin);
    const int64_t end_of_pads = begin + zone_rows(end_of_rows - begin, alignment);
    const int64_t end = between(zone_begin[local_expert + 1], end_of_rows);
    return {begin, end_of_rows, end_of_pads < end ? end_of_pads : end};
  }

private:
  static constexpr bool is_below(int32_t value, int32_t end) {
    return static_cast<uint32_t>(value) < static_cast<uint32_t>(end);
  }
  static constexpr int32_t clamp(int32_t value, int32_t end) {
    const auto last = static_cast<uint32_t>(end - 1);
    return static_cast<int32_t>(static_cast<uint32_t>(value) < last ? static_cast<uint32_t>(value) : last);
  }
  constexpr int64_t between(int64_t slot, int64_t from) const {
    return slot < from ? from : slot < num_slots ? slot : num_slots;
  }
};

// Walks the slots of one token on this rank, in k order. It ends after K steps at most, even where damaged records form a ring.
class SlotChain {
public:
  constexpr SlotChain(const HandleLimits& limits, const SlotRecord* records, int32_t first_slot)
      : records_(records), slot_(first_slot), num_slots_(limits.num_slots), steps_left_(limits.top_k) {}

  constexpr bool has_slot() const {
    return static_cast<uint32_t>(slot_) < static_cast<uint32_t>(num_slots_) && steps_left_ > 0;
  }
  constexpr int32_t slot() const { return slot_; }
  constexpr void advance() {
    slot_ = records_[slot_].next_slot;
    --steps_left_;
  }

private:
  const SlotRecord* records_;
  int32_t slot_;
  int32_t num_slots_;
  int steps_left_;
};

} // namespace epx
