// SPDX-License-Identifier: Apache-2.0
// Handle memory holds the routing state of one layer in flight; the caller owns it. It contains no pointers, so that its
// bytes may be copied. prepare, prepare_dispatch or dispatch_rank_major writes it; it is read-only afterwards.
//
//   HandleHeader | Route [max_tokens, K] | zone begin int32 [E_l + 1] | zone rows int32 [E_l] | SlotRecord [R]
//   | first_slots int32 [P, max_tokens] | ll_slots int32 [P, ll_tokens, K]
//
// A rank-major plan (rank_major.h) uses the same places, so that one size serves both: the routes; slot records, of which there
// are P * slots_per_source, and behind them as many RankMajorMasks, which together are at most R; and SourceRows [P] in the
// place of first_slots.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/checked_math.h"
#include "base/host_device.h"
#include "runtime/config.h"
#include "runtime/layout/rank_major.h"
#include "runtime/layout/slots.h"

namespace epx {

constexpr uint64_t kHandleMagic = 0x3265'6c64'6e68'7865; // "exhndle2"

struct HandleHeader {
  uint64_t magic;
  uint64_t group_id;
  uint64_t plan_id;    // sequence number of the call that wrote the plan
  int64_t num_tokens;  // T
  int64_t rows_in_use; // offsets[E_l]; rank-major: P * slots_per_source, whether the slots have rows or not
  uint16_t top_k;
  uint16_t is_compact; // rank-major: 1 if the receive rows of the sources follow each other (EPX_ROWS_COMPACT); else 0
  int32_t alignment;   // effective
  int32_t rank;
  int32_t ll_tokens; // the largest T of all ranks, if movements take the low-latency path; else 0. Only kernels use it
  int64_t rows_per_source; // rank-major: M; else kExpertMajor
  uint64_t checksum;       // of all fields above
  uint64_t body_checksum;  // of the bytes behind the header, if the group checks them (handle_checksum.h); else 0
};

// FNV-1a by words instead of bytes, since every thread of a kernel computes it before it uses the header. Each step is a
// bijection, so that another word always yields another sum.
constexpr uint64_t header_checksum(const HandleHeader& header) {
  const uint64_t words[] = {header.magic,
                            header.group_id,
                            header.plan_id,
                            static_cast<uint64_t>(header.num_tokens),
                            static_cast<uint64_t>(header.rows_in_use),
                            static_cast<uint64_t>(header.is_compact) << 48 | static_cast<uint64_t>(header.top_k) << 32 |
                                static_cast<uint32_t>(header.alignment),
                            static_cast<uint64_t>(static_cast<uint32_t>(header.rank)) << 32 |
                                static_cast<uint32_t>(header.ll_tokens),
                            static_cast<uint64_t>(header.rows_per_source)};
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint64_t word : words) {
    hash = (hash ^ word) * 0x100000001b3;
    hash ^= hash >> 29; // so that high bits reach the low ones
  }
  return hash;
}

// Returns whether the counts in a header can be those of the group. This catches damage that leaves the checksum right.
constexpr bool counts_fit(const HandleHeader& header, const GroupShape& shape, int64_t max_ll_tokens) {
  return (header.num_tokens >= 0) & (header.num_tokens <= shape.max_tokens_per_rank) & (header.rows_in_use >= 0) &
         (header.rows_in_use <= shape.max_recv_tokens) &
         ((header.ll_tokens == 0) | ((header.ll_tokens >= header.num_tokens) & (header.ll_tokens <= max_ll_tokens)));
}

struct HandleLayout {
  int64_t routes; // byte offsets
  int64_t zone_begin;
  int64_t zone_rows;
  int64_t slot_records;
  int64_t first_slots;
  int64_t ll_slots;
  int64_t total_bytes;
};

inline HandleLayout make_handle_layout(const GroupShape& shape, int top_k) {
  const char* what = "handle memory";
  // Every rank's handle memory has room for the largest block of experts, so that the size is the same on all ranks.
  const int64_t experts = (static_cast<int64_t>(shape.num_experts) + shape.num_ranks - 1) / shape.num_ranks;
  HandleLayout layout{};
  int64_t end = checked_round_up(sizeof(HandleHeader), kRowAlignment, what);
  const auto append = [&](int64_t count, int64_t bytes_each) {
    const int64_t offset = end;
    end = checked_round_up(checked_add(end, checked_mul(count, bytes_each, what), what), kRowAlignment, what);
    return offset;
  };
  layout.routes = append(checked_mul(shape.max_tokens_per_rank, top_k, what), sizeof(Route));
  layout.zone_begin = append(experts + 1, sizeof(int32_t));
  layout.zone_rows = append(experts, sizeof(int32_t));
  layout.slot_records = append(shape.max_recv_tokens, sizeof(SlotRecord));
  const int64_t ints_per_rank = std::max<int64_t>(shape.max_tokens_per_rank, sizeof(SourceRows) / sizeof(int32_t));
  layout.first_slots = append(checked_mul(shape.num_ranks, ints_per_rank, what), sizeof(int32_t));
  layout.ll_slots = append(checked_mul(shape.num_ranks * max_ll_tokens(shape), top_k, what), sizeof(int32_t));
  layout.total_bytes = end;
  return layout;
}

// Gives typed access to handle memory at `base`; the pointers are const if the memory is.
template <typename Byte>
struct HandleView {
  template <typename T>
  using Ptr = std::conditional_t<std::is_const_v<Byte>, const T*, T*>;

  EPX_HOST_DEVICE HandleView(Byte* base, const HandleLayout& layout)
      : header(reinterpret_cast<Ptr<HandleHeader>>(base)), routes(reinterpret_cast<Ptr<Route>>(base + layout.routes)),
        zone_begin(reinterpret_cast<Ptr<int32_t>>(base + layout.zone_begin)),
        zone_rows(reinterpret_cast<Ptr<int32_t>>(base + layout.zone_rows)),
        slot_records(reinterpret_cast<Ptr<SlotRecord>>(base + layout.slot_records)),
        source_rows(reinterpret_cast<Ptr<SourceRows>>(base + layout.first_slots)),
        first_slots(reinterpret_cast<Ptr<int32_t>>(base + layout.first_slots)),
        ll_slots(reinterpret_cast<Ptr<int32_t>>(base + layout.ll_slots)) {}

  // The masks of a rank-major plan with so many slots.
  EPX_HOST_DEVICE Ptr<RankMajorMask> masks(int64_t slots) const {
    return reinterpret_cast<Ptr<RankMajorMask>>(slot_records + slots);
  }

  Ptr<HandleHeader> header;
  Ptr<Route> routes;
  Ptr<int32_t> zone_begin; // first slot of each zone, then the end of the last
  Ptr<int32_t> zone_rows;  // kept routes of each zone; pads follow, up to the alignment
  Ptr<SlotRecord> slot_records;
  Ptr<SourceRows> source_rows; // rank-major: by source rank [P]; in the place of first_slots
  Ptr<int32_t> first_slots;    // first slot here of each source's tokens; -1: none. Only kernels write and read it
  Ptr<int32_t> ll_slots; // LL path only: slot here of each source's (token, k); -1: none. Only kernels write and read it
};

using HandleReader = HandleView<const std::byte>;
using HandleWriter = HandleView<std::byte>;

} // namespace epx
