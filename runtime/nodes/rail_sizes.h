// SPDX-License-Identifier: Apache-2.0
// RailSizes says how many rows each transfer of a movement has.
#pragma once

#include <cstdint>

#include "runtime/nodes/rail_records.h"

namespace epx::cuda {

// Tokens travel home to relay in a scatter, and rows relay to home in a gather.
class RailSizes {
public:
  // Exact sizes, by the records that this rank has sent and received.
  RailSizes(const MultiNodeShape& shape, int top_k, const int32_t* sent, const int32_t* received)
      : shape_(&shape), top_k_(top_k), sent_(sent), received_(received) {}
  // Fixed sizes: all that there can be.
  RailSizes(const MultiNodeShape& shape, int top_k) : RailSizes(shape, top_k, nullptr, nullptr) {}

  // Tokens of a chunk that this rank sends to `node`, or relays for its rail peer there.
  int64_t home_tokens(int node, int chunk) const { return tokens_in_chunk(sent_, node, chunk); }
  int64_t relay_tokens(int node, int chunk) const { return tokens_in_chunk(received_, node, chunk); }
  // The same of all chunks.
  int64_t home_tokens(int node) const { return tokens(sent_, node); }
  int64_t relay_tokens(int node) const { return tokens(received_, node); }
  // Rows that come home from `node` in all, or that this rank sends home as a relay.
  int64_t home_rows(int node) const { return rows(sent_, node); }
  int64_t relay_rows(int node) const { return rows(received_, node); }
  // Tokens of the leg of another node.
  int64_t leg_tokens(int node, int chunk) const {
    return are_fixed() ? tokens_in_chunk(received_, node, chunk) : of(received_).leg_tokens(node, chunk, false);
  }

private:
  bool are_fixed() const { return sent_ == nullptr; }
  RailRecords of(const int32_t* records) const { return {*shape_, records}; }
  int64_t tokens(const int32_t* records, int node) const {
    return are_fixed() ? shape_->max_rail_tokens() : of(records).num_tokens(node);
  }
  int64_t tokens_in_chunk(const int32_t* records, int node, int chunk) const {
    return shape_->tokens_in_chunk(tokens(records, node), chunk);
  }
  int64_t rows(const int32_t* records, int node) const {
    return are_fixed() ? int64_t{shape_->max_rail_tokens()} * shape_->max_back_rows(top_k_)
                       : of(records).back_rows(node, top_k_, shape_->num_chunks() - 1);
  }

  const MultiNodeShape* shape_;
  int top_k_;
  const int32_t* sent_;
  const int32_t* received_;
};

} // namespace epx::cuda
