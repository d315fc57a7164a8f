// SPDX-License-Identifier: Apache-2.0
// The orders of rows in the native way (--native), which sends one row per route. A rank packs the rows of its routes by
// expert, and so by rank. They arrive by (source rank, expert), and are permuted by (expert, source rank): the expert-major
// layout without pads. Within the routes of a source to an expert the order is that of (token, k).
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace epx::bench {

// A SourceOrder has the packed rows of one rank's routes.
struct SourceOrder {
  std::vector<int32_t> counts;      // [E] routes to each expert
  std::vector<int32_t> packed_from; // [T * K] the token of each packed row
  std::vector<int32_t> packed_row;  // [T, K] the packed row of each route
};
// `topk_idx` [T, K] has experts in [0, num_experts) only.
SourceOrder source_order(std::span<const int64_t> topk_idx, int top_k, int32_t num_experts);

// RowsByPeer are the rows that a rank sends in a dispatch and receives in it; in a combine it is the other way round.
struct RowsByPeer {
  std::vector<int64_t> sent;     // [P]
  std::vector<int64_t> received; // [P]

  int64_t num_received() const { return std::reduce(received.begin(), received.end()); } // N
};

// Computes them from what a rank knows when counts have been exchanged: `counts` [E] of its own routes, and `arriving` [P, E_l]
// of each source to its experts. `first_experts` [P + 1] has the first expert of each rank, and at last E.
RowsByPeer rows_by_peer(std::span<const int32_t> counts, std::span<const int32_t> arriving,
                        std::span<const int32_t> first_experts);

// Fills in, for each row in expert-major order, the row that it has in the order of arrival. `arriving` [P, E_l], `rows` [N].
void fill_arrival_order(std::span<const int32_t> arriving, int num_ranks, std::span<int32_t> rows);

} // namespace epx::bench
