// SPDX-License-Identifier: Apache-2.0
// Counts the rows that cross between nodes of a group. Rank i of a node has a rail to rank i of each other node, a rail peer;
// what the ranks of node m have for a token of rank (n, i), or from it, crosses between (n, i) and (m, i).
#pragma once

#include <cstdint>
#include <vector>

#include "epx/epx.h"
#include "tools/ep_bench/floor/floor_plan.h"
#include "tools/ep_bench/lines.h"

namespace epx::bench {

// Of which of these there is one row on a rail.
enum class RailRow {
  Token, // (token, other node): dispatch, combine_bwd, and combine and dispatch_bwd with precision node
  Pair,  // (token, rank of another node): combine and dispatch_bwd with precision wire
  Route, // route to another node: the same with precision exact
};
RailRow rail_row(epx_operation operation, epx_combine_precision precision);

// Returns the number of rows on the rail between rank `home` and its rail peer on `node`, for tokens of `home`. No route may be
// dropped.
int64_t rail_rows(const RoutingOfAll& routing, int ranks_per_node, int home, int node, RailRow row);

// PeerRows are the rows that a rank sends to a rail peer, and receives from it, in an operation.
struct PeerRows {
  int peer;
  int64_t sent;
  int64_t received;
};

// Returns those of `rank`, one for each other node, in the order of nodes.
std::vector<PeerRows> rail_peers(const RoutingOfAll& routing, int ranks_per_node, int rank, epx_operation operation,
                                 epx_combine_precision precision);

} // namespace epx::bench
