// SPDX-License-Identifier: Apache-2.0
// The row lists and row counts of the speed-of-light bound (--floor) are compared with a count by hand and a count row by row.
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/floor/floor_plan.h"
#include "tools/ep_bench/floor/rail_plan.h"
#include "tools/ep_bench/workload/routing.h"

namespace epx::bench {
namespace {

const Line& line_named(const char* name) {
  for (const Line& line : kLines)
    if (std::string(line.name) == name) return line;
  FAIL(name, " is not a line");
  return kLines[0];
}

void check_bytes(const LocalBytes& bytes, int64_t reads, int64_t writes) {
  CHECK(bytes.reads == reads);
  CHECK(bytes.writes == writes);
}

// All rows have one byte.
LocalBytes local_rows(const RoutingOfAll& routing, int rank, const Line& line, bool exact) {
  return local_bytes(routing, rank, line, exact, {1, 1, 1});
}

TEST_CASE("ep_bench floor: counted by hand") {
  // Rank 0 owns experts 0 and 1, rank 1 owns 2, rank 2 none of 3. Two tokens per rank, K = 2, zones of 4 rows.
  const RoutingOfAll routing{.topk_idx = {{0, 1, 2, 0}, {0, 1, 2, 2}, {0, 2, 1, 1}},
                             .first_experts = {0, 2, 3},
                             .num_experts = 3,
                             .top_k = 2,
                             .alignment = 4};
  CHECK(routing.owner(0) == 0);
  CHECK(routing.owner(1) == 0);
  CHECK(routing.owner(2) == 1);
  CHECK(rows_of_places(routing, false) == 6);

  const WirePlan sent = scatter_plan(routing, 0);
  REQUIRE(sent.rows() == 2);
  CHECK(sent.first == std::vector<int32_t>{0, 1, 3}); // token 1 goes to ranks 1 (the cyclic order begins there) and 0
  CHECK(sent.places[1].rank == 1);
  CHECK(sent.places[2].rank == 0);
  CHECK(sent.places[2].row == 1);
  CHECK(scatter_plan(routing, 2).places[0].row == 4);
  CHECK(gather_plan(routing, 2, false).rows() == 0);
  CHECK(gather_plan(routing, 0, false).rows() == 5);
  CHECK(gather_plan(routing, 0, true).rows() == 8);

  // Rank 0: experts 0 and 1 have 4 slots each; arrived are rank 1's token 0 (twice) and rank 2's 0 and 1 (twice); sent is
  // its token 1 to rank 1.
  check_bytes(local_rows(routing, 0, line_named("dispatch"), false), 2 + 2, 4 + 4);
  check_bytes(local_rows(routing, 0, line_named("combine_bwd"), false), 2 + 3 + 8, 3 + 8);
  check_bytes(local_rows(routing, 0, line_named("combine_bwd-nograd"), false), 2 + 3, 3 + 8);
  check_bytes(local_rows(routing, 0, line_named("combine"), false), 8 + 1, 1 + 2);
  RoutingOfAll padded = routing;
  padded.alignment = 8;
  check_bytes(local_rows(padded, 0, line_named("dispatch"), false), 2 + 2, 8 + 8);
  padded.clears_pads = false;
  check_bytes(local_rows(padded, 0, line_named("dispatch"), false), 2 + 2, 4 + 4);
  // In the rank-major layout rank 0 keeps its own two tokens and the three that arrived, once each.
  RoutingOfAll rank_major = routing;
  rank_major.alignment = 1;
  rank_major.layout = Layout::RankMajor;
  check_bytes(local_rows(rank_major, 0, kRankMajorLines[0], false), 2, 5);         // dispatch
  check_bytes(local_rows(rank_major, 0, kRankMajorLines[1], false), 5 + 1, 1 + 2); // combine
  check_bytes(local_rows(rank_major, 0, kRankMajorLines[2], false), 2, 5);         // combine_bwd
  check_bytes(local_rows(rank_major, 0, kRankMajorLines[3], false), 5 + 1, 1 + 2); // dispatch_bwd
  check_bytes(local_rows(rank_major, 0, kRankMajorLines[4], false), 0, 0);
  // Rank 1: 4 slots, of which its own token 1 has two; arrived are one row each of ranks 0 and 2.
  check_bytes(local_rows(routing, 1, line_named("dispatch"), false), 2, 4);
  // Rank 2 sends 3 pairs, 4 routes.
  check_bytes(local_rows(routing, 2, line_named("dispatch_bwd"), false), 3, 3 + 2);
  check_bytes(local_rows(routing, 2, line_named("dispatch_bwd"), true), 4, 4 + 2);
  check_bytes(local_rows(routing, 0, line_named("prepare"), false), 0, 0);
  check_bytes(local_rows(routing, 0, line_named("prepare+dispatch+combine"), false), 0, 0);
  check_bytes(local_rows(routing, 0, line_named("prepare_dispatch+combine"), false), 0, 0);
}

TEST_CASE("ep_bench floor: bytes of rows that are quantised on the way") {
  // The routing above: rank 0 has 2 tokens, 8 slots, and 3 rows that arrived, 2 of them for several slots.
  RoutingOfAll routing{.topk_idx = {{0, 1, 2, 0}, {0, 1, 2, 2}, {0, 2, 1, 1}},
                       .first_experts = {0, 2, 3},
                       .num_experts = 3,
                       .top_k = 2,
                       .alignment = 8};
  const Line &dispatch = line_named("dispatch"), &rank_major = kRankMajorLines[0];
  const RowBytes in_the_call{1000, 600, 600}, before{600, 600, 600}, on_the_wire{1000, 600, 1000};
  check_bytes(local_bytes(routing, 0, dispatch, false, in_the_call), 2 * 1000 + 2 * 600, 16 * 600);
  check_bytes(local_bytes(routing, 0, dispatch, false, before), 2 * 600 + 2 * 600, 16 * 600);
  check_bytes(local_bytes(routing, 0, dispatch, false, on_the_wire), 2 * 1000 + 3 * 600, 3 * 600 + 16 * 1000);
  routing.clears_pads = false;
  check_bytes(local_bytes(routing, 0, dispatch, false, in_the_call), 2 * 1000 + 2 * 600, 8 * 600);
  check_bytes(local_bytes(routing, 0, dispatch, false, on_the_wire), 2 * 1000 + 3 * 600, 3 * 600 + 8 * 1000);
  // Rank 0 sums up 8 slots, or rank-major 5 rows. What comes back of its token 1 from rank 1 lies in staging.
  for (const char* line : {"combine", "dispatch_bwd"})
    check_bytes(local_bytes(routing, 0, line_named(line), false, on_the_wire), 8 * 1000 + 600, 600 + 2 * 1000);
  routing.layout = Layout::RankMajor;
  check_bytes(local_bytes(routing, 0, rank_major, false, in_the_call), 2 * 1000, 5 * 600);
  check_bytes(local_bytes(routing, 0, rank_major, false, on_the_wire), 2 * 1000 + 3 * 600, 3 * 600 + 5 * 1000);
  check_bytes(local_bytes(routing, 0, kRankMajorLines[1], false, on_the_wire), 5 * 1000 + 600, 600 + 2 * 1000);
}

RoutingOfAll random_routing(int num_ranks, int32_t tokens, double hot) {
  RoutingOfAll routing{.topk_idx = {}, .first_experts = {}, .num_experts = 10, .top_k = 4, .alignment = 3};
  for (int rank = 0; rank < num_ranks; ++rank) {
    routing.topk_idx.push_back(hot_routing({.tokens = tokens, .experts = 10, .top_k = 4, .seed = 5}, hot, 0, rank));
    routing.first_experts.push_back(rank * (10 / num_ranks) + std::min(rank, 10 % num_ranks));
  }
  return routing;
}

// All routes one by one: (source, token, expert rank) -> number of routes.
std::map<std::tuple<int, int64_t, int>, int64_t> pairs_of(const RoutingOfAll& routing) {
  std::map<std::tuple<int, int64_t, int>, int64_t> pairs;
  for (int source = 0; source < routing.num_ranks(); ++source)
    for (size_t route = 0; route < routing.topk_idx[source].size(); ++route)
      ++pairs[{source, static_cast<int64_t>(route) / routing.top_k, routing.owner(routing.topk_idx[source][route])}];
  return pairs;
}

TEST_CASE("ep_bench floor: rows between rail peers, counted by hand") {
  // 2 nodes of 2 ranks; rank r owns expert r. Two tokens per rank, K = 3.
  const RoutingOfAll routing{.topk_idx = {{0, 2, 3, 1, 0, 1}, {2, 2, 3, 3, 3, 0}, {2, 3, 2, 0, 0, 1}, {3, 2, 2, 3, 3, 2}},
                             .first_experts = {0, 1, 2, 3},
                             .num_experts = 4,
                             .top_k = 3};
  CHECK(rail_row(EPX_OP_COMBINE_BWD, EPX_COMBINE_EXACT) == RailRow::Token);
  CHECK(rail_row(EPX_OP_COMBINE, EPX_COMBINE_NODE) == RailRow::Token);
  CHECK(rail_row(EPX_OP_DISPATCH_BWD, EPX_COMBINE_WIRE) == RailRow::Pair);
  CHECK(rail_row(EPX_OP_COMBINE, EPX_COMBINE_EXACT) == RailRow::Route);

  const auto check_peers = [&](int rank, epx_operation operation, epx_combine_precision precision, PeerRows expected) {
    const std::vector<PeerRows> peers = rail_peers(routing, 2, rank, operation, precision);
    REQUIRE(peers.size() == 1);
    CHECK(peers[0].peer == expected.peer);
    CHECK(peers[0].sent == expected.sent);
    CHECK(peers[0].received == expected.received);
  };
  // Rank 0 has one token for node 1, with ranks 2 and 3; rank 2 one for node 0, with rank 0 twice and rank 1.
  check_peers(0, EPX_OP_DISPATCH, EPX_COMBINE_EXACT, {2, 1, 1});
  check_peers(0, EPX_OP_COMBINE, EPX_COMBINE_NODE, {2, 1, 1});
  check_peers(0, EPX_OP_COMBINE, EPX_COMBINE_WIRE, {2, 2, 2});
  check_peers(0, EPX_OP_DISPATCH_BWD, EPX_COMBINE_EXACT, {2, 3, 2});
  check_peers(2, EPX_OP_COMBINE, EPX_COMBINE_EXACT, {0, 2, 3});
  // Rank 1 has two tokens for node 1: ranks 2 (twice) and 3, and rank 3 twice; rank 3 has none for node 0.
  check_peers(1, EPX_OP_DISPATCH, EPX_COMBINE_WIRE, {3, 2, 0});
  check_peers(1, EPX_OP_COMBINE, EPX_COMBINE_WIRE, {3, 0, 3});
  check_peers(3, EPX_OP_COMBINE, EPX_COMBINE_EXACT, {1, 5, 0});
  CHECK(rail_peers(routing, 4, 0, EPX_OP_DISPATCH, EPX_COMBINE_WIRE).empty());
  CHECK(rail_peers(routing, 1, 1, EPX_OP_DISPATCH, EPX_COMBINE_WIRE).size() == 3);
  CHECK(rail_peers(routing, 1, 1, EPX_OP_DISPATCH, EPX_COMBINE_WIRE)[2].sent == 2); // both tokens to rank 3
}

TEST_CASE("ep_bench floor: every row goes to every place once") {
  for (int num_ranks : {1, 2, 3, 4, 7})
    for (double hot : {0.0, 0.7}) {
      const RoutingOfAll routing = random_routing(num_ranks, 23, hot);
      const auto pairs = pairs_of(routing);
      std::set<std::pair<int, int>> scattered, gathered, exact; // (rank, row) of all sources
      size_t exact_rows = 0, places = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const WirePlan scatter = scatter_plan(routing, rank);
        CHECK(scatter.rows() == 23);
        places += scatter.places.size();
        for (int32_t token = 0; token < scatter.rows(); ++token)
          for (int32_t place = scatter.first[token]; place < scatter.first[token + 1]; ++place) {
            scattered.insert({scatter.places[place].rank, scatter.places[place].row});
            CHECK(pairs.contains({rank, token, scatter.places[place].rank}));
            CHECK(scatter.places[place].row == rank * 23 + token);
          }
        for (const RowPlace& place : gather_plan(routing, rank, false).places) {
          gathered.insert({place.rank, place.row});
          CHECK(pairs.contains({place.rank, place.row - rank * 23, rank}));
        }
        const WirePlan of_routes = gather_plan(routing, rank, true);
        exact_rows += of_routes.places.size();
        for (const RowPlace& place : of_routes.places) {
          exact.insert({place.rank, place.row});
          CHECK(place.row < rows_of_places(routing, true));
          CHECK(routing.owner(routing.topk_idx[place.rank][place.row]) == rank);
        }
      }
      CHECK(places == pairs.size());
      CHECK(scattered.size() == pairs.size());
      CHECK(gathered.size() == pairs.size());
      CHECK(exact_rows == static_cast<size_t>(num_ranks) * 23 * 4);
      CHECK(exact.size() == exact_rows);
    }
}

TEST_CASE("ep_bench floor: local rows, route by route") {
  for (int num_ranks : {1, 2, 3, 4, 7})
    for (double hot : {0.0, 0.7}) {
      const RoutingOfAll routing = random_routing(num_ranks, 23, hot);
      const auto pairs = pairs_of(routing);
      for (int rank = 0; rank < num_ranks; ++rank) {
        int64_t arrived = 0, several = 0, sent = 0, sent_routes = 0, slots = 0, in_use = 0;
        for (const auto& [pair, routes] : pairs) {
          const auto [source, token, owner] = pair;
          if (owner == rank) slots += routes;
          if (owner == rank && source != rank) {
            ++arrived;
            if (routes > 1) ++several;
          }
          if (source == rank && owner != rank) {
            ++sent;
            sent_routes += routes;
          }
        }
        std::map<int64_t, int64_t> demand;
        for (const auto& topk_idx : routing.topk_idx)
          for (int64_t expert : topk_idx)
            if (routing.owner(expert) == rank) ++demand[expert];
        for (const auto& [expert, routes] : demand) {
          in_use += routes;
          while (in_use % 3 != 0)
            ++in_use;
        }
        check_bytes(local_rows(routing, rank, line_named("dispatch"), false), 23 + several, in_use);
        check_bytes(local_rows(routing, rank, line_named("combine"), false), slots + sent, sent + 23);
        check_bytes(local_rows(routing, rank, line_named("dispatch_bwd"), true), slots + sent_routes, sent_routes + 23);
        check_bytes(local_rows(routing, rank, line_named("combine_bwd"), true), 23 + arrived + slots, arrived + in_use);
        check_bytes(local_rows(routing, rank, line_named("combine_bwd-nograd"), true), 23 + arrived, arrived + in_use);
      }
    }
}

} // namespace
} // namespace epx::bench
