// SPDX-License-Identifier: Apache-2.0
// These tests check what ep_bench computes from its measurements: statistics, row counts, figures, report.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/copy_baseline.h"
#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/report.h"
#include "tools/ep_bench/stats.h"
#include "tools/ep_bench/traffic.h"

namespace epx::bench {
namespace {

TEST_CASE("ep_bench statistics") {
  CHECK(median({3}) == 3);
  CHECK(median({5, 1, 3}) == 3);
  CHECK(median({4, 1, 3, 2}) == 2.5);
  std::vector<double> hundred;
  for (int i = 100; i > 0; --i)
    hundred.push_back(i);
  CHECK(percentile(hundred, 99) == 99);
  CHECK(percentile({2, 1}, 99) == 2);
  CHECK(percentile({7}, 0) == 7);
  CHECK(minimum(hundred) == 1);

  const std::vector<Series> ranks{{{0, 1000}, {100, 5100}, {0, 2000}}, {{500, 4500}, {0, 5000}, {10, 2000}}};
  CHECK(slowest_us(ranks) == std::vector<double>{4, 5, 2});
  CHECK(most_often_slowest(ranks) == 0); // in iterations 1 (a tie) and 2
  CHECK(span_us(ranks) == std::vector<double>{4.5, 5.1, 2});
  CHECK(start_skew_us(ranks) == std::vector<double>{0.5, 0.1, 0.01});
  CHECK(most_often_slowest(std::vector<Series>{{{0, 1}}, {{0, 3}}, {{0, 2}}}) == 1);
}

TEST_CASE("ep_bench counts rows from slots") {
  // Rank 0 owns experts 0 and 1, rank 1 owns 2, rank 2 none of 3.
  const std::vector<int32_t> first_experts{0, 2, 3};
  const std::vector<int64_t> topk_idx{0, 1, 2, /**/ 2, 2, 0, /**/ 2, 1, 0};
  const std::vector<int32_t> slot{0, 1, 0, /**/ 1, 2, -1, /**/ -1, -1, -1};
  const Traffic home = count_traffic(topk_idx, slot, 3, first_experts, 0);
  CHECK(home.tokens == 3);
  CHECK(home.routes == 5);
  CHECK(home.remote_routes == 3);
  CHECK(home.pairs == 3);
  CHECK(home.remote_pairs == 2);
  const Traffic far = count_traffic(topk_idx, slot, 3, first_experts, 2);
  CHECK(far.remote_routes == 5);
  CHECK(far.remote_pairs == 3);

  // Rank-major: tokens 0 and 1 are rows 0 and 1 of rank 0, and token 2 is its row 2; the tokens are rows 0, 1 and 2 of rank 1.
  CHECK(rank_major_rows(topk_idx, 3, first_experts, 3) == std::vector<int32_t>{0, 0, 0, /**/ 1, 1, 1, /**/ 2, 2, 2});
  CHECK(rank_major_rows(topk_idx, 3, first_experts, 2) == std::vector<int32_t>{0, 0, 0, /**/ 1, 1, 1, /**/ -1, -1, -1});
  CHECK(rank_major_rows(std::vector<int64_t>{2, 2, /**/ 0, 1}, 2, first_experts, 1) == std::vector<int32_t>{0, 0, 0, 0});
  CHECK(logical_rows(EPX_OP_COMBINE, home, Layout::RankMajor) == 3);
  CHECK(written_rows(EPX_OP_DISPATCH, home, EPX_COMBINE_WIRE, Layout::RankMajor) == 3);
  CHECK(written_rows(EPX_OP_COMBINE, home, EPX_COMBINE_WIRE, Layout::RankMajor) == 3 + 3);
  CHECK(logical_rows(EPX_OP_PREPARE, home) == 0);
  CHECK(logical_rows(EPX_OP_COMBINE, home) == 5);
  CHECK(written_rows(EPX_OP_DISPATCH, home, EPX_COMBINE_WIRE) == 5);
  CHECK(written_rows(EPX_OP_COMBINE_BWD, home, EPX_COMBINE_EXACT) == 5);
  CHECK(written_rows(EPX_OP_COMBINE, home, EPX_COMBINE_WIRE) == 3 + 3);
  CHECK(written_rows(EPX_OP_DISPATCH_BWD, home, EPX_COMBINE_EXACT) == 5 + 3);
  CHECK(wire_rows(EPX_OP_DISPATCH, home, EPX_COMBINE_EXACT) == 2);
  CHECK(wire_rows(EPX_OP_COMBINE, home, EPX_COMBINE_WIRE) == 2);
  CHECK(wire_rows(EPX_OP_COMBINE, home, EPX_COMBINE_EXACT) == 3);
  const Survey survey{.sets = {home, far}, .max_rows = 3};
  CHECK(dropped_routes(survey, 3) == 4);
}

Results sample_results() {
  Results results;
  results.options = options_of({"--hidden", "500", "--iters", "1", "--warmup", "1", "--input-sets", "2"}); // 1000-byte rows
  results.library_version = 123;
  results.group.num_ranks = 2;
  results.group.transport = EPX_TRANSPORT_HOST;
  results.group.max_recv_tokens_per_rank = 4096;
  // Iteration 1, the only one timed, takes set 1.
  const Survey survey{.sets = {{}, {.tokens = 20, .routes = 80, .remote_routes = 40, .pairs = 60, .remote_pairs = 30}}};
  Measurements measurements(kNumOperations);
  for (OperationSeries& series : measurements)
    series.call = {{{1000, 9000}}, {{3000, 11000}}}; // 8 us each
  for (int op = 1; op < kNumOperations; ++op)
    measurements[op].copy = {{{0, 3000}}, {{1000, 4000}}}; // 4 us together
  results.figures = compute_figures(measurements, {}, survey, results.options);
  return results;
}

TEST_CASE("ep_bench figures in closed form") {
  const Results results = sample_results();
  const Figures& figures = results.figures;
  const OperationFigures &prepare = figures[0], &dispatch = figures[1], &combine = figures[2], &combine_bwd = figures[3],
                         &dispatch_bwd = figures[4];
  CHECK(prepare.median_us == 8);
  CHECK_FALSE(prepare.logical_gbps);
  CHECK_FALSE(prepare.copy);
  CHECK(prepare.start_skew_us == 2);
  CHECK(*dispatch.logical_gbps == doctest::Approx(40 * 1000 / 8e-6 / 1e9));
  CHECK(*dispatch.wire_gbps == doctest::Approx(15 * 1000 / 8e-6 / 1e9));
  CHECK(dispatch.copy->median_us == 4);
  CHECK(dispatch.copy->gbps == doctest::Approx(80 * 1000 / 4e-6 / 1e9));
  CHECK(dispatch.copy->ratio == doctest::Approx(0.5));
  CHECK(combine.written_rows == 40);
  CHECK(combine_bwd.written_rows == 40);
  CHECK(dispatch_bwd.wire_rows == 15);
}

TEST_CASE("ep_bench report: table and JSON say the same, and a dash or null where nothing was measured") {
  Results results = sample_results();
  CHECK(passed(results));
  nlohmann::json json = to_json(results);
  CHECK(json["epx_version"] == "0.1.23");
  CHECK(json["ranks"] == 2);
  CHECK(json["config"]["hidden"] == 500);
  CHECK(json["config"]["routing"] == "uniform");
  CHECK(json["operations"].size() == 5);
  CHECK(json["operations"]["prepare"]["memcpy_ratio"].is_null());
  CHECK(json["operations"]["dispatch"]["memcpy_ratio"].get<double>() == doctest::Approx(0.5));
  CHECK(json["operations"]["dispatch"]["wrong"].is_null());
  CHECK(json["passed"] == true);
  CHECK(contains(to_table(results), "dispatch_bwd"));
  CHECK_FALSE(contains(to_table(results), "event"));

  results.wrong = WrongCounts{0, 0, 3, 0, 0};
  CHECK_FALSE(passed(results));
  json = to_json(results);
  CHECK(json["operations"]["dispatch"]["wrong"] == 0);
  CHECK(json["operations"]["combine"]["wrong"] == 3);
  CHECK(json["passed"] == false);

  results.wrong = WrongCounts(kNumOperations);
  results.events[EPX_EVENT_OVERFLOW] = 5;
  CHECK_FALSE(passed(results)); // R is the worst case: nothing may overflow
  results.options.capacity = 10;
  CHECK(passed(results));
  CHECK(contains(to_table(results), "event overflow: 5"));
  results.events[EPX_EVENT_BAD_INDEX] = 1;
  CHECK_FALSE(passed(results));
  CHECK(to_json(results)["events"]["bad_index"] == 1);

  CHECK(handle_memory_limit(results.options, results.group) == 16 * (512 * 4 + 4096) + 8 * 2 * 32 + 65536);
}

TEST_CASE("ep_bench report on GPUs: more lines, and ratios to the larger speed-of-light bound") {
  Results results = sample_results();
  results.options.transport = results.group.transport = EPX_TRANSPORT_NCCL;
  results.options.floor = true;
  Measurements measurements(kLines.size());
  for (OperationSeries& series : measurements)
    series.call = {{{0, 6000}}, {{0, 8000}}};
  Floors floors(kLines.size());
  floors[1] = FloorFigures{.wire_us = 5,
                           .hbm_us = 4,
                           .wire_variant = "plain stores, 64 blocks",
                           .hbm_variant = "plain stores, 132 blocks of 1024 threads"};
  floors[2] = FloorFigures{
      .wire_us = 1, .hbm_us = 2, .wire_variant = "bulk stores, 16 blocks", .hbm_variant = "bulk stores, 132 blocks"};
  results.figures = compute_figures(measurements, floors, {.sets = {{}, {}}}, results.options);
  CHECK_FALSE(results.figures[1].copy);
  CHECK_FALSE(results.figures[1].start_skew_us);
  CHECK(*results.figures[1].floor_ratio == doctest::Approx(1.6));
  CHECK(*results.figures[2].floor_ratio == doctest::Approx(4));
  CHECK_FALSE(results.figures[0].floor_ratio);
  CHECK_FALSE(results.figures[6].logical_gbps);

  const nlohmann::json operations = to_json(results)["operations"];
  CHECK(operations.size() == 9);
  CHECK(operations["dispatch"]["floor"]["wire_us"] == 5);
  CHECK(operations["dispatch"]["floor"]["wire_variant"] == "plain stores, 64 blocks");
  CHECK(operations["combine"]["floor"]["us"] == 2);
  CHECK(operations["combine"]["ratio"] == 4);
  CHECK(operations["prepare+dispatch+combine"]["floor"].is_null());
  CHECK(operations["prepare_dispatch"]["floor"].is_null());
  CHECK(operations["combine_bwd-nograd"]["median_us"] == 8);
  const std::string table = to_table(results);
  for (const char* part : {"floor us", "ratio", "1.600", "prepare+dispatch+combine", "prepare_dispatch+combine",
                           "wire 5.0 us (plain stores, 64 blocks)", "HBM 2.0 us (bulk stores, 132 blocks)"})
    CHECK_MESSAGE(contains(table, part), table);
  CHECK_FALSE(contains(table, "memcpy"));
  CHECK_FALSE(results.figures[1].floor_ratio_on_sms);

  results.options.num_comm_sms = 16;
  for (auto& floor : {&floors[1], &floors[2]}) {
    (*floor)->wire_us_on_sms = 6;
    (*floor)->hbm_us_on_sms = 7;
  }
  results.figures = compute_figures(measurements, floors, {.sets = {{}, {}}}, results.options);
  CHECK(*results.figures[1].floor_ratio == doctest::Approx(1.6));
  CHECK(to_json(results)["operations"]["dispatch"]["ratio_on_comm_sms"].get<double>() == doctest::Approx(8.0 / 7));
  CHECK_MESSAGE(contains(to_table(results), "on 16 SMs 6.0 and 7.0 us: ratio 1.143"), to_table(results));

  results.group.num_comm_sms = 100; // the report has the group's number, whether the option or the default chose it
  CHECK(to_json(results)["config"]["num_comm_sms"] == 100);
  CHECK_MESSAGE(contains(to_table(results), "SMs for communication: 100 (--num-comm-sms)"), to_table(results));
  results.options.num_comm_sms = 0;
  CHECK_MESSAGE(contains(to_table(results), "SMs for communication: 100 (the library's default)"), to_table(results));
}

TEST_CASE("ep_bench copy baseline writes every row once") {
  const std::vector<int64_t> row_counts{0, 5, 3};
  CopyBaseline baseline(row_counts, 4, 1);
  const std::vector<std::byte> source(8, std::byte{7});
  baseline.scatter(source, 5);
  CHECK(std::ranges::count(baseline.target(), std::byte{7}) == 5 * 4);
  baseline.scatter({}, 0);
  const std::vector<std::byte> other(8, std::byte{9});
  baseline.gather(other, 3);
  CHECK(std::ranges::count(baseline.target(), std::byte{9}) == 3 * 4);
  baseline.gather({}, 0);
}

} // namespace
} // namespace epx::bench
