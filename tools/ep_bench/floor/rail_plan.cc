// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/floor/rail_plan.h"

#include <algorithm>
#include <set>

namespace epx::bench {

RailRow rail_row(epx_operation operation, epx_combine_precision precision) {
  const bool goes_home = operation == EPX_OP_COMBINE || operation == EPX_OP_DISPATCH_BWD;
  if (!goes_home || precision == EPX_COMBINE_NODE) return RailRow::Token;
  return precision == EPX_COMBINE_EXACT ? RailRow::Route : RailRow::Pair;
}

int64_t rail_rows(const RoutingOfAll& routing, int ranks_per_node, int home, int node, RailRow row) {
  int64_t rows = 0;
  for (int64_t token = 0; token < routing.tokens(); ++token) {
    std::set<int> ranks; // of the node that have experts of the token
    int64_t routes = 0;
    for (int k = 0; k < routing.top_k; ++k) {
      const int owner = routing.owner(routing.topk_idx[home][token * routing.top_k + k]);
      if (owner / ranks_per_node != node) continue;
      ranks.insert(owner);
      ++routes;
    }
    rows += row == RailRow::Route ? routes : row == RailRow::Pair ? std::ssize(ranks) : std::min<int64_t>(routes, 1);
  }
  return rows;
}

std::vector<PeerRows> rail_peers(const RoutingOfAll& routing, int ranks_per_node, int rank, epx_operation operation,
                                 epx_combine_precision precision) {
  const bool goes_home = operation == EPX_OP_COMBINE || operation == EPX_OP_DISPATCH_BWD;
  const RailRow row = rail_row(operation, precision);
  const int own_node = rank / ranks_per_node;
  std::vector<PeerRows> peers;
  for (int node = 0; node < routing.num_ranks() / ranks_per_node; ++node) {
    if (node == own_node) continue;
    const int peer = node * ranks_per_node + rank % ranks_per_node;
    const int64_t of_mine = rail_rows(routing, ranks_per_node, rank, node, row);
    const int64_t of_peer = rail_rows(routing, ranks_per_node, peer, own_node, row);
    peers.push_back(goes_home ? PeerRows{peer, of_peer, of_mine} : PeerRows{peer, of_mine, of_peer});
  }
  return peers;
}

} // namespace epx::bench
