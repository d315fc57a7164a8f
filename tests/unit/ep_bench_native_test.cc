// SPDX-License-Identifier: Apache-2.0
// The orders of rows of the native way (--native) are compared with a count by hand and with the serial reference's slots; its
// figures are in closed form.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "runtime/reference/reference.h"
#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/native/native_figures.h"
#include "tools/ep_bench/native/native_plan.h"
#include "tools/ep_bench/report.h"
#include "tools/ep_bench/workload/routing.h"

namespace epx::bench {
namespace {

TEST_CASE("ep_bench native way: counted by hand") {
  // Rank 0 owns experts 0 and 1, rank 1 owns 2, rank 2 none of 3. K = 2.
  const std::vector<int64_t> topk_idx{2, 0, 1, 2, 0, 0};
  const SourceOrder order = source_order(topk_idx, 2, 3);
  CHECK(order.counts == std::vector<int32_t>{3, 1, 2});
  CHECK(order.packed_row == std::vector<int32_t>{4, 0, 3, 5, 1, 2});
  CHECK(order.packed_from == std::vector<int32_t>{0, 2, 2, 1, 0, 1});

  const std::vector<int32_t> first_experts{0, 2, 3, 3}, arriving{3, 1, 0, 2, 4, 1}; // [3 ranks, 2 experts]
  const RowsByPeer rows = rows_by_peer(order.counts, arriving, first_experts);
  CHECK(rows.sent == std::vector<int64_t>{4, 2, 0});
  CHECK(rows.received == std::vector<int64_t>{4, 2, 5});
  CHECK(rows.num_received() == 11);
  std::vector<int32_t> arrival(11);
  fill_arrival_order(arriving, 3, arrival);
  CHECK(arrival == std::vector<int32_t>{0, 1, 2, 6, 7, 8, 9, 3, 4, 5, 10});

  const RowsByPeer without_experts = rows_by_peer(order.counts, {}, first_experts);
  CHECK(without_experts.received == std::vector<int64_t>{0, 0, 0});
  CHECK(source_order({}, 2, 3).counts == std::vector<int32_t>{0, 0, 0});
}

// A Row of the native way is told by its source rank and the token that it is a copy of.
using Row = std::pair<int, int32_t>;

TEST_CASE("ep_bench native way: rows end in the slots of the contract, and come back to their routes") {
  for (const int num_ranks : {1, 2, 3, 4, 7})
    for (const double hot : {0.0, 0.7}) {
      CAPTURE(num_ranks);
      CAPTURE(hot);
      constexpr int32_t kTokens = 40, kExperts = 5, kTopK = 3;
      std::vector<reference::Routing> routing;
      std::vector<SourceOrder> orders;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::vector<int64_t> topk_idx = hot_routing({kTokens, kExperts, kTopK, 9}, hot, 0, rank);
        orders.push_back(source_order(topk_idx, kTopK, kExperts));
        routing.push_back({kTokens, topk_idx});
      }
      const reference::Plan plan =
          reference::prepare({.num_experts = kExperts, .top_k = kTopK, .max_recv_tokens = 1000}, routing);
      std::vector<int32_t> first_experts;
      for (const reference::RankPlan& rank : plan.ranks)
        first_experts.push_back(rank.first_local_expert);
      first_experts.push_back(kExperts);

      std::vector<RowsByPeer> rows;
      std::vector<std::vector<int32_t>> arriving(static_cast<size_t>(num_ranks)); // [P, E_l] of each rank
      for (size_t rank = 0; rank < arriving.size(); ++rank) {
        for (const SourceOrder& order : orders)
          arriving[rank].insert(arriving[rank].end(), order.counts.begin() + first_experts[rank],
                                order.counts.begin() + first_experts[rank + 1]);
        rows.push_back(rows_by_peer(orders[rank].counts, arriving[rank], first_experts));
      }
      for (size_t rank = 0; rank < arriving.size(); ++rank) {
        std::vector<Row> arrived;
        for (size_t source = 0; source < arriving.size(); ++source) {
          CHECK(rows[source].sent[rank] == rows[rank].received[source]);
          int64_t before = 0;
          for (size_t peer = 0; peer < rank; ++peer)
            before += rows[source].sent[peer];
          for (int64_t row = before; row < before + rows[source].sent[rank]; ++row)
            arrived.emplace_back(source, orders[source].packed_from[static_cast<size_t>(row)]);
        }
        std::vector<int32_t> arrival(static_cast<size_t>(rows[rank].num_received()));
        fill_arrival_order(arriving[rank], num_ranks, arrival);
        REQUIRE(std::ssize(arrival) == plan.ranks[rank].offsets.back());
        for (size_t row = 0; row < arrival.size(); ++row) {
          const int32_t* const origin = plan.ranks[rank].slot_origin.data() + 3 * row;
          CHECK(arrived[static_cast<size_t>(arrival[row])] == Row(origin[0], origin[1]));
        }
        for (size_t route = 0; route < orders[rank].packed_row.size(); ++route)
          CHECK(orders[rank].packed_from[static_cast<size_t>(orders[rank].packed_row[route])] ==
                static_cast<int32_t>(route) / kTopK);
        std::vector<int32_t> packed = orders[rank].packed_row; // a permutation
        std::ranges::sort(packed);
        for (size_t row = 0; row < packed.size(); ++row)
          CHECK(packed[row] == static_cast<int32_t>(row));
      }
    }
}

TEST_CASE("ep_bench native way: figures and report") {
  if (!built_with_cuda()) return;
  Results results;
  results.options =
      options_of({"--transport", "nccl", "--native", "--hidden", "50", "--iters", "2", "--warmup", "1", "--verify"});
  results.group.num_ranks = 4;
  results.group.ranks_per_node = 2;
  results.group.transport = EPX_TRANSPORT_NCCL;
  Measurements measurements(kLines.size());
  for (size_t line = 0; line < kLines.size(); ++line)
    measurements[line].call.assign(
        4, {{0, 1000 * static_cast<int64_t>(line + 1)}, {0, 1000 * static_cast<int64_t>(line + 1)}});
  // Of three iterations on two sets the last two are timed, sets 1 and 0.
  const Survey survey{.sets = {{.remote_routes = 40, .rail_routes = 24}, {.remote_routes = 80, .rail_routes = 40}},
                      .ranks_per_node = 2};
  results.figures = compute_figures(measurements, {}, survey, results.options);
  NativeMeasurements native;
  native.calls[0].assign(4, {{0, 10'000}, {0, 10'000}});
  native.calls[1].assign(4, {{0, 5000}, {0, 5000}});
  native.calls[2].assign(4, {{0, 6000}, {0, 6000}});
  native.calls[2][3] = {{0, 8000}, {0, 10'000}}; // the slowest rank
  results.native = compute_native_figures(native, results.figures, survey, results.options);

  CHECK(results.native->sent_bytes == doctest::Approx((40 + 80) * 100 / (2 * 4.0)));
  CHECK(results.native->sent_to_nodes_bytes == doctest::Approx((24 + 40) * 100 / (2 * 4.0)));
  REQUIRE(results.native->calls.size() == 3);
  const NativeCallFigures& dispatch = results.native->calls[0];
  REQUIRE(dispatch.ratios.size() == 2);
  CHECK(dispatch.ratios[0].ratio == doctest::Approx(5));        // dispatch takes 2 us
  CHECK(dispatch.ratios[1].ratio == doctest::Approx(10.0 / 8)); // prepare_dispatch takes 8
  CHECK(results.native->calls[1].ratios[0].ratio == doctest::Approx(2.5));
  CHECK(results.native->calls[2].median_us == doctest::Approx(9));
  CHECK(results.native->calls[2].slowest_rank == 3);
  CHECK(results.native->calls[2].ratios[0].ratio == doctest::Approx(3)); // combine takes 3 us
  CHECK_FALSE(dispatch.wrong);

  const std::string table = to_table(results);
  for (const char* part : {"a rank sends 1500 bytes of rows in a call, 800 of them to other nodes", "native/epx",
                           "dispatch-nocounts", "5.000", "1.250", "2.500", "3.000"})
    CHECK_MESSAGE(contains(table, part), table);
  nlohmann::json json = to_json(results);
  CHECK(json["config"]["native"] == true);
  CHECK(json["native"]["calls"]["dispatch"]["ratio_to"]["prepare_dispatch"].get<double>() == doctest::Approx(1.25));
  CHECK(json["native"]["calls"]["combine"]["wrong"].is_null());
  CHECK(json["native"]["sent_to_nodes_bytes"].get<double>() == doctest::Approx(800));
  CHECK(passed(results));

  native.wrong = NativeWrongCounts{0, 0, 7};
  results.native = compute_native_figures(native, results.figures, survey, results.options);
  CHECK_FALSE(passed(results));
  CHECK(to_json(results)["native"]["calls"]["combine"]["wrong"] == 7);
  results.native.reset();
  CHECK(to_json(results)["native"].is_null());
  CHECK_FALSE(contains(to_table(results), "native"));
}

} // namespace
} // namespace epx::bench
