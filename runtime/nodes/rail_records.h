// SPDX-License-Identifier: Apache-2.0
// The records that rail peers send each other at the begin of each movement. What a peer has sent is not trusted: whatever the
// words are, the numbers that this returns fit the group. Both ends of a rail get the same numbers from the same
// record.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"
#include "runtime/layout/multi_node_shape.h"
#include "runtime/layout/rail_layout.h"

namespace epx::cuda {

// AgreedFields travel as words at any place.
EPX_HOST_DEVICE inline AgreedFields load_agreed_fields(const int32_t* words) {
  AgreedFields fields{};
  memcpy(static_cast<void*>(&fields), words, sizeof(fields));
  return fields;
}
EPX_HOST_DEVICE inline void store_agreed_fields(int32_t* words, const AgreedFields& fields) {
  memcpy(words, &fields, sizeof(fields));
}

// Reads the records of all nodes [N, record_words]: those that this rank has sent, or has received. In both, the record of the
// own node is this rank's own: it has all of the rank's tokens.
class RailRecords {
public:
  // The records are not copied, and neither is the shape.
  EPX_HOST_DEVICE RailRecords(const MultiNodeShape& shape, const int32_t* records) : shape_(shape), records_(records) {}

  EPX_HOST_DEVICE uint64_t plan_id(int node) const {
    const int32_t* const words = record(node);
    return static_cast<uint64_t>(static_cast<uint32_t>(words[1])) << 32 | static_cast<uint32_t>(words[0]);
  }
  // Returns whether the rail peer on a node takes part with the plan that this rank has. In a group of one node such a rank is
  // active (Movement::is_active).
  EPX_HOST_DEVICE bool is_active(int node) const { return plan_id(node) != 0 && plan_id(node) == plan_id(shape_.own_node); }
  EPX_HOST_DEVICE AgreedFields agreed(int node) const { return load_agreed_fields(record(node) + kRecordAgreedWord); }
  EPX_HOST_DEVICE int64_t num_tokens(int node) const {
    return std::max(int64_t{0}, std::min<int64_t>(record(node)[2], max_tokens(node)));
  }
  // Returns how many rows come home of the tokens up to the end of a chunk.
  EPX_HOST_DEVICE int64_t back_rows(int node, int top_k, int chunk) const {
    const int32_t* const ends = record(node) + kRecordHeaderWords;
    int64_t rows = 0;
    for (int i = 0; i <= chunk; ++i)
      rows = std::max(rows, std::min<int64_t>(ends[i], max_back_rows(node, top_k, i)));
    return rows;
  }

  // In received records: returns how many tokens the leg of a node and chunk has. With fixed sizes each rail peer has as many
  // as it can have. So has, with exact sizes too, one that is not active: it sends no rows (kSendsNoRows), and this rank does
  // not know for which of its tokens the own plan has slots.
  EPX_HOST_DEVICE int64_t leg_tokens(int node, int chunk, bool has_fixed_sizes) const {
    const bool has_all = node != shape_.own_node && (has_fixed_sizes || !is_active(node));
    return shape_.tokens_in_chunk(has_all ? max_tokens(node) : num_tokens(node), chunk);
  }

private:
  EPX_HOST_DEVICE const int32_t* record(int node) const { return records_ + node * record_words(shape_); }
  EPX_HOST_DEVICE int max_tokens(int node) const {
    return node == shape_.own_node ? shape_.group.max_tokens_per_rank : shape_.max_rail_tokens();
  }
  EPX_HOST_DEVICE int64_t max_back_rows(int node, int top_k, int chunk) const {
    const int64_t end = (int64_t{chunk} + 1) * shape_.chunk_tokens();
    return std::min(num_tokens(node), end) * shape_.max_back_rows(top_k);
  }

  const MultiNodeShape& shape_;
  const int32_t* records_;
};

} // namespace epx::cuda
