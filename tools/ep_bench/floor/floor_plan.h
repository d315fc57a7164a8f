// SPDX-License-Identifier: Apache-2.0
// The rows that an operation must move at least are counted and listed here from the routing of all ranks; the kernels of the
// speed-of-light bound move them. No route may be dropped: every route has a slot.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/ep_bench/lines.h"
#include "tools/ep_bench/row_format.h"

namespace epx::bench {

// A RowPlace is a row of the target buffer on a rank.
struct RowPlace {
  int32_t rank;
  int32_t row;
};

// A WirePlan lists the rows that one rank stores, each to all its places: row i to places[first[i]] .. places[first[i + 1] -
// 1].
struct WirePlan {
  std::vector<int32_t> first{0}; // [rows + 1]
  std::vector<RowPlace> places;

  int32_t rows() const { return static_cast<int32_t>(first.size()) - 1; }
};

// RoutingOfAll is the routing of all ranks in one input set.
struct RoutingOfAll {
  std::vector<std::vector<int64_t>> topk_idx; // [P] of [T, K]
  std::vector<int32_t> first_experts;         // [P] first expert of each rank, ascending
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t alignment = 1;
  bool clears_pads = true; // in dispatch
  Layout layout = Layout::ExpertMajor;

  int num_ranks() const { return static_cast<int>(topk_idx.size()); }
  int64_t tokens() const { return static_cast<int64_t>(topk_idx[0].size()) / top_k; } // T, of each rank
  int owner(int64_t expert) const;
};

// In dispatch and combine_bwd each token's row goes once to each distinct rank that owns experts of it, also to its own rank;
// there it lies at row `source rank * T + token`. A token's ranks are listed cyclically from `rank + token` modulo P, so that
// not all ranks store to the same one at the same time.
WirePlan scatter_plan(const RoutingOfAll& routing, int rank);

// In combine and dispatch_bwd with precision wire the traffic is transposed: one row per token of any rank that has experts
// here goes to the token's home rank; there it lies at row `expert rank * T + token`. With precision exact there is one row per
// route, at row `token * K + k`. For each token number the home ranks are listed cyclically from `rank + token` modulo P.
WirePlan gather_plan(const RoutingOfAll& routing, int rank, bool exact);

// Returns the rows of the target buffer that the plans of all ranks write to.
int64_t rows_of_places(const RoutingOfAll& routing, bool exact);

// LocalBytes counts the bytes of the rows that an operation must read from and write to the memory of one rank's GPU. With
//   T       tokens of this rank                        rows in use  slots of this rank, pads too
//   arrived rows of other ranks' tokens with slots here, one per (token, this rank)
//   sent    rows of this rank's tokens with slots elsewhere, one per (token, other rank); exact: one per route
//   slots   routes to this rank, also those of its own tokens
// the minimum is
//   dispatch            reads T + those of `arrived` that have more than one slot   writes rows in use (a row arrives in
//                       its first slot; an own token is read once and written to all its slots); `slots` where pads
//                       stay untouched
//   combine_bwd         reads T + arrived + slots (expert_out)                      writes arrived + rows in use (the
//                       weights are the receiver's: what arrived is scaled into the slots)
//   combine_bwd-nograd  reads T + arrived                                           writes arrived + rows in use
//   combine             reads slots + sent (what came back)                         writes sent (what comes back) + T
//   dispatch_bwd        as combine
// In the rank-major layout `slots` are the rows of this rank, one per (token, this rank), and combine_bwd copies bits as
// dispatch does:
//   dispatch, combine_bwd  reads T                                                 writes slots
// A row of the tokens has the input's bytes, one in slots those of received rows, and one that arrived or was sent those of
// the wire. A row of dispatch that does not land as it travels is written to staging, and read from there:
//   dispatch, both layouts  reads also arrived                                      writes also arrived
// instead of those that have more than one slot. What combine and dispatch_bwd send always lies in staging. Index lists and
// weights are not counted. All 0 for a line that moves no rows.
struct LocalBytes {
  int64_t reads = 0;
  int64_t writes = 0;
};
LocalBytes local_bytes(const RoutingOfAll& routing, int rank, const Line& line, bool exact, const RowBytes& bytes);

} // namespace epx::bench
