// SPDX-License-Identifier: Apache-2.0
// EPX_CHECK_HANDLE_MEM: the checksum covers handle memory behind its header. Host and device compute the same sum, in any order
// of the words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"
#include "runtime/group_context.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/layout/multi_node_handle.h"
#include "runtime/layout/slots.h"

namespace epx {

// A section consists of words [first + i * stride, ... + words) of the handle memory, i < rows. A word has 32 bits.
struct BodySection {
  int64_t first;
  int64_t rows;
  int64_t words; // of each row
  int64_t stride;
};

// Returns the sections of the body that a call may read. The caller has checked that the header is intact and its counts fit
// the group.
constexpr std::array<BodySection, 6> body_sections(const HandleHeader& header, const HandleLayout& layout,
                                                   const GroupContext& context) {
  constexpr auto kWord = static_cast<int64_t>(sizeof(uint32_t));
  const GroupShape& shape = context.shape;
  const ExpertBlocks experts{shape.num_experts, shape.num_ranks};
  const int64_t zones = experts.num_local_experts(context.rank);
  const int64_t routes = header.num_tokens * header.top_k;
  const bool by_kernels = context.window_access == WindowAccess::by_kernels;
  if (header.rows_per_source != kExpertMajor) {
    const int64_t records = header.rows_in_use * (header.top_k > 1 ? 2 : 1); // and masks
    return {{{layout.routes / kWord, 1, routes * static_cast<int64_t>(sizeof(Route)) / kWord, 0},
             {layout.slot_records / kWord, 1, records * static_cast<int64_t>(sizeof(SlotRecord)) / kWord, 0},
             {layout.first_slots / kWord, 1, shape.num_ranks * static_cast<int64_t>(sizeof(SourceRows)) / kWord, 0}}};
  }
  const int64_t first_slots = by_kernels ? static_cast<int64_t>(shape.num_ranks) * shape.max_tokens_per_rank : 0;
  const int64_t ll_ranks = by_kernels ? shape.num_ranks : 0;
  return {{{layout.routes / kWord, 1, routes * static_cast<int64_t>(sizeof(Route)) / kWord, 0},
           {layout.zone_begin / kWord, 1, zones + 1, 0},
           {layout.zone_rows / kWord, 1, zones, 0},
           {layout.slot_records / kWord, 1, header.rows_in_use * static_cast<int64_t>(sizeof(SlotRecord)) / kWord, 0},
           {layout.first_slots / kWord, 1, first_slots, 0},
           {layout.ll_slots / kWord, ll_ranks, static_cast<int64_t>(header.ll_tokens) * header.top_k,
            context.layout.ll_tokens * header.top_k}}};
}

// The same of a group of several nodes on GPUs: all that its prepare writes.
constexpr std::array<BodySection, 12> body_sections(const HandleHeader& header, const MultiNodeHandleLayout& layout,
                                                    const MultiNodeShape& shape) {
  constexpr auto kWord = static_cast<int64_t>(sizeof(uint32_t));
  constexpr int64_t kRouteWords = sizeof(Route) / sizeof(uint32_t);
  constexpr int64_t kRecordWords = sizeof(SlotRecord) / sizeof(uint32_t);
  const ExpertBlocks experts{shape.group.num_experts, shape.group.num_ranks};
  const int64_t zones = experts.num_local_experts(shape.rank);
  const int64_t nodes = shape.num_nodes();
  const int64_t tokens = shape.padded_tokens();
  return {{{layout.home_routes / kWord, 1, header.num_tokens * header.top_k * kRouteWords, 0},
           {layout.sent_tokens / kWord, 1, nodes * tokens, 0},
           {layout.positions / kWord, 1, nodes * tokens, 0},
           {layout.token_counts / kWord, 1, 2 * nodes, 0},
           {layout.home_back_rows / kWord, 1, nodes * (tokens + 1), 0},
           {layout.relay_back_rows / kWord, 1, nodes * (tokens + 1), 0},
           {layout.zone_begin / kWord, 1, zones + 1, 0},
           {layout.zone_rows / kWord, 1, zones, 0},
           {layout.no_zones / kWord, 1, zones + 1, 0},
           {layout.slot_records / kWord, 1, header.rows_in_use * kRecordWords, 0},
           {layout.leg_routes / kWord, 1, nodes * tokens * header.top_k * kRouteWords, 0},
           {layout.leg_first_slots / kWord, 1, nodes * tokens * shape.ranks_per_node(), 0}}};
}

// Returns what one word adds to the sum. Each step is a bijection, so that each pair of index and word has a value of its own:
// the sum always changes when one word does.
constexpr uint64_t summand(int64_t index, uint32_t word) {
  uint64_t x = static_cast<uint64_t>(index) << 32 | word;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// Returns the partial sum of thread `thread` of `threads`; the checksum is the sum of all threads' values. `group` is what
// body_sections takes.
template <typename Layout, typename Group>
EPX_HOST_DEVICE inline uint64_t body_checksum(const std::byte* handle_mem, const HandleHeader& header, const Layout& layout,
                                              const Group& group, int64_t thread = 0, int64_t threads = 1) {
  uint64_t sum = 0;
  for (const BodySection& section : body_sections(header, layout, group))
    for (int64_t row = 0; row < section.rows; ++row)
      for (int64_t i = thread; i < section.words; i += threads) {
        const int64_t index = section.first + row * section.stride + i;
        uint32_t word;
        memcpy(&word, handle_mem + index * static_cast<int64_t>(sizeof(word)), sizeof(word));
        sum += summand(index, word);
      }
  return sum;
}

} // namespace epx
