// SPDX-License-Identifier: Apache-2.0
// On GPUs, a group of several nodes makes each of its calls as calls of this rank's node alone, its *legs*. A leg moves rows
// between a node's tokens and the slots of this node, for one chunk of the tokens of each rank of that node: a rank stands for
// its rail peer on the leg's node, whose tokens come and go by rail (docs/decisions/0019).
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/config.h"
#include "runtime/layout/slots.h"

namespace epx {

constexpr int kMaxChunkTokens = 1024;

struct MultiNodeShape {
  GroupShape group; // of all ranks
  GroupShape node;  // of a leg: this node's ranks and experts, and the tokens of a chunk
  int rank;         // of the group
  int own_node;

  constexpr int num_nodes() const { return group.num_nodes(); }
  constexpr int ranks_per_node() const { return group.ranks_per_node; } // G
  constexpr int index_in_node() const { return rank % ranks_per_node(); }
  constexpr int first_rank() const { return own_node * ranks_per_node(); } // of this node
  constexpr int chunk_tokens() const { return node.max_tokens_per_rank; }  // C
  constexpr int num_chunks() const { return (group.max_tokens_per_rank + chunk_tokens() - 1) / chunk_tokens(); }
  constexpr int num_legs() const { return num_nodes() * num_chunks(); } // L
  // leg(own_node, 0) clears pads and reports events, once for the call. It is the first leg of prepare and of a scatter; in a
  // gather the legs of the other nodes come before it.
  constexpr int leg(int node_index, int chunk) const { return node_index * num_chunks() + chunk; }
  // Returns how many tokens of a chunk there are, if there are `tokens` in all.
  constexpr int64_t tokens_in_chunk(int64_t tokens, int chunk) const {
    return std::clamp<int64_t>(tokens - int64_t{chunk} * chunk_tokens(), 0, chunk_tokens());
  }
  constexpr int64_t padded_tokens() const { return int64_t{num_chunks()} * chunk_tokens(); } // at least max_tokens

  constexpr int max_rail_tokens() const { return group.max_rail_tokens(); } // of a rank, to each other node

  // Returns how many rows of a token come home from one node at most: node partials, partials of each rank, or routes.
  constexpr int max_back_rows(int top_k) const {
    if (group.precision == EPX_COMBINE_NODE) return 1;
    return group.precision == EPX_COMBINE_EXACT ? top_k : std::min(ranks_per_node(), top_k);
  }
};

// Within a node, experts are in blocks by the same rule as in the group, because the ranks with one more come first.
constexpr MultiNodeShape make_multi_node_shape(const GroupShape& group, int rank) {
  MultiNodeShape shape{group, group, rank, group.node_of(rank)};
  const ExpertBlocks experts{group.num_experts, group.num_ranks};
  shape.node.num_ranks = group.ranks_per_node;
  shape.node.num_experts =
      experts.first_expert(shape.first_rank() + group.ranks_per_node) - experts.first_expert(shape.first_rank());
  shape.node.max_tokens_per_rank = std::min(group.max_tokens_per_rank, kMaxChunkTokens);
  shape.node.precision = group.precision == EPX_COMBINE_EXACT ? EPX_COMBINE_EXACT : EPX_COMBINE_WIRE;
  return shape;
}

} // namespace epx
