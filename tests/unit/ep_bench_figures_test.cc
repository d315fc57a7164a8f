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
#include "tools/ep_bench/workload/traffic.h"

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
  const Traffic home = count_traffic(topk_idx, slot, 3, first_experts, 0, 3);
  CHECK(home.tokens == 3);
  CHECK(home.routes == 5);
  CHECK(home.remote_routes == 3);
  CHECK(home.pairs == 3);
  CHECK(home.remote_pairs == 2);
  const Traffic far = count_traffic(topk_idx, slot, 3, first_experts, 2, 3);
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
  CHECK(home.rail_routes + home.rail_pairs + home.rail_tokens == 0); // one node
  // Each rank is a node of its own; and ranks 0 and 1 are one, of which rank 2 sees a token of both once.
  const Traffic of_three = count_traffic(topk_idx, slot, 3, first_experts, 0, 1);
  CHECK(of_three.rail_routes == 3);
  CHECK(of_three.rail_pairs == 2);
  CHECK(of_three.rail_tokens == 2);
  const Traffic of_two = count_traffic(topk_idx, slot, 3, first_experts, 2, 2);
  CHECK(of_two.rail_routes == 5);
  CHECK(of_two.rail_pairs == 3);
  CHECK(of_two.rail_tokens == 2);
  CHECK(count_traffic(topk_idx, slot, 3, first_experts, 0, 2).rail_routes == 0);
  const Survey survey{.sets = {home, far}, .max_rows = 3};
  CHECK(dropped_routes(survey, 3) == 4);
}

const Line& line_of(epx_operation operation) {
  return *std::ranges::find(kLines, operation, &Line::operation);
}

void check_rail_bytes(const std::vector<const char*>& arguments, epx_operation operation, double needed, double sent) {
  // Rows of 100 bytes. 2 nodes of 2 ranks: 4 rails, each seen from one end.
  std::vector<const char*> all{"--hidden", "50", "--tokens", "20", "--top-k", "3", "--transport", "nccl"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const Traffic traffic{.rail_routes = 90, .rail_pairs = 60, .rail_tokens = 40};
  const RailBytes bytes = rail_bytes(line_of(operation), traffic, options_of(all), 4, 2);
  CHECK(bytes.needed == needed);
  CHECK(bytes.sent == sent);
}

TEST_CASE("ep_bench counts bytes on rails") {
  if (!built_with_cuda()) return;
  // Weights: 4 bytes for each (token, k) of dispatch and dispatch_bwd, and for each row of an exact combine.
  check_rail_bytes({}, EPX_OP_DISPATCH, 4000, 4000 + 40 * 12);
  check_rail_bytes({}, EPX_OP_COMBINE_BWD, 4000, 4000);
  check_rail_bytes({}, EPX_OP_COMBINE, 6000, 6000);
  check_rail_bytes({}, EPX_OP_DISPATCH_BWD, 6000, 6000 + 40 * 12);
  check_rail_bytes({"--combine-precision", "node"}, EPX_OP_COMBINE, 4000, 4000);
  check_rail_bytes({"--combine-precision", "exact"}, EPX_OP_COMBINE, 9000, 9000 + 90 * 4);
  check_rail_bytes({"--combine-precision", "exact"}, EPX_OP_DISPATCH_BWD, 9000, 9000 + 40 * 12);
  check_rail_bytes({"--combine-precision", "exact"}, EPX_OP_DISPATCH, 4000, 4000 + 40 * 12);
  // Quantised rows of 50 bytes and 2 scales.
  check_rail_bytes({"--wire-format", "fp8-mx"}, EPX_OP_DISPATCH, 40 * 52, 40 * 52 + 40 * 12);
  check_rail_bytes({"--wire-format", "fp8-mx"}, EPX_OP_COMBINE_BWD, 4000, 4000);
  check_rail_bytes({"--sum-format", "fp8-mx"}, EPX_OP_COMBINE, 60 * 52, 60 * 52);
  // Fixed sizes: 4 x 20 tokens, and 4 x 15.
  check_rail_bytes({"--graph"}, EPX_OP_DISPATCH, 4000, 80 * 112);
  check_rail_bytes({"--graph"}, EPX_OP_COMBINE, 6000, 80 * 2 * 100);
  check_rail_bytes({"--fixed-rail-tokens", "15"}, EPX_OP_COMBINE_BWD, 4000, 60 * 100);
  check_rail_bytes({"--graph", "--fixed-rail-tokens", "15", "--combine-precision", "exact"}, EPX_OP_COMBINE, 9000,
                   60 * 3 * 104);
  check_rail_bytes({"--graph", "--combine-precision", "node"}, EPX_OP_DISPATCH_BWD, 4000, 80 * 112);
}

Results sample_results() {
  Results results;
  results.options = options_of({"--hidden", "500", "--iters", "1", "--warmup", "1", "--input-sets", "2"}); // 1000-byte rows
  results.library_version = 123;
  results.group.num_ranks = results.group.ranks_per_node = 2;
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

TEST_CASE("ep_bench figures of quantised rows count the bytes that travel and land") {
  const Survey survey{.sets = {{.tokens = 20, .routes = 80, .remote_routes = 40, .pairs = 60, .remote_pairs = 30}}};
  Measurements measurements(kNumOperations);
  for (OperationSeries& series : measurements) {
    series.call.assign(2, {{0, 8000}});
    series.copy.assign(2, {{0, 4000}});
  }
  const auto figures_of = [&](std::vector<const char*> arguments) {
    arguments.insert(arguments.end(), {"--hidden", "512", "--iters", "1", "--warmup", "0"}); // 1024 bytes in bf16
    return compute_figures(measurements, {}, survey, options_of(arguments));
  };
  constexpr double kSeconds = 8e-6, kFp8 = 512 + 16; // a scale for each 32 elements
  const Figures arrive = figures_of({"--row-format", "fp8-mx"});
  CHECK(*arrive[1].row_bytes == RowBytes{1024, 528, 528});
  CHECK(*arrive[1].logical_gbps == doctest::Approx(40 * kFp8 / kSeconds / 1e9));
  CHECK(*arrive[1].wire_gbps == doctest::Approx(15 * kFp8 / kSeconds / 1e9));
  CHECK(arrive[1].copy->gbps == doctest::Approx(80 * kFp8 / 4e-6 / 1e9));
  CHECK(*arrive[2].logical_gbps == doctest::Approx(40 * 1024 / kSeconds / 1e9)); // combine
  CHECK_FALSE(arrive[0].row_bytes);
  const Figures travel = figures_of({"--wire-format", "fp8-mx"});
  CHECK(*travel[1].logical_gbps == doctest::Approx(40 * 1024 / kSeconds / 1e9));
  CHECK(*travel[1].wire_gbps == doctest::Approx(15 * kFp8 / kSeconds / 1e9));

  const Figures sums = figures_of({"--sum-format", "fp8-mx"});
  for (const int line : {2, 4}) { // combine, dispatch_bwd
    CHECK(*sums[line].row_bytes == RowBytes{1024, 528, 1024});
    CHECK(*sums[line].logical_gbps == doctest::Approx(40 * 1024 / kSeconds / 1e9));
    CHECK(*sums[line].wire_gbps == doctest::Approx(15 * kFp8 / kSeconds / 1e9));
  }
  CHECK(*sums[3].row_bytes == RowBytes{1024, 1024, 1024}); // combine_bwd

  Results results = sample_results();
  CHECK(to_json(results)["config"]["sum_format"].is_null());
  CHECK_FALSE(contains(to_table(results), "partial sums of combine"));
  CHECK(to_json(results)["config"]["row_format"].is_null());
  CHECK(to_json(results)["config"]["quantised_input"].is_null());
  CHECK_FALSE(contains(to_table(results), "rows of dispatch in"));
  results.options.row_format = NamedFormat::Fp8Mx;
  results.options.scale_layout = EPX_SCALES_PACKED;
  results.figures[1] = arrive[1];
  const nlohmann::json json = to_json(results);
  CHECK(json["config"]["row_format"] == "fp8-mx");
  CHECK(json["config"]["quantised_input"] == false);
  CHECK(json["config"]["scale_layout"] == "packed");
  CHECK(json["config"]["wire_format"].is_null());
  CHECK(json["operations"]["dispatch"]["row_bytes"]["wire"] == 528);
  CHECK(json["operations"]["prepare"]["row_bytes"].is_null());
  CHECK_MESSAGE(contains(to_table(results), "fp8-mx, quantised in the call, scales in packed; a row has 1000 bytes in the "
                                            "input, 516 on the wire, 516 where it is received"),
                to_table(results));
  results.options.sum_format = NamedFormat::Fp8Block128;
  CHECK(to_json(results)["config"]["sum_format"] == "fp8-block128");
  CHECK(contains(to_table(results),
                 "partial sums of combine and dispatch_bwd in fp8-block128; a sum has 516 bytes on the wire"));
}

TEST_CASE("ep_bench report: table and JSON say the same, and a dash or null where nothing was measured") {
  Results results = sample_results();
  CHECK(passed(results));
  nlohmann::json json = to_json(results);
  CHECK(version_string(results.library_version) == "0.1.23");
  CHECK(json["group"]["ranks_per_node"] == 2);
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
                           .hbm_variant = "plain stores, 132 blocks of 1024 threads",
                           .wire_us_of_variants = {{"plain stores, 64 blocks", 5}, {"bulk stores, 64 blocks", 5.5}}};
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
  CHECK(operations["dispatch"]["floor"]["wire_us_of_variants"]["bulk stores, 64 blocks"] == 5.5);
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
  CHECK(to_json(results)["config"]["num_comm_sms"] == 16); // asked for
  CHECK(to_json(results)["group"]["num_comm_sms"] == 100);
  CHECK_MESSAGE(contains(to_table(results), "SMs for communication: 100 (--num-comm-sms)"), to_table(results));
  results.options.num_comm_sms = 0;
  CHECK_MESSAGE(contains(to_table(results), "SMs for communication: 100 (the library's default)"), to_table(results));
}

TEST_CASE("ep_bench report of several nodes: bytes on rails, and the time of NCCL alone as the bound") {
  if (!built_with_cuda()) return;
  Results results;
  results.options = options_of({"--transport", "nccl", "--floor", "--hidden", "50", "--iters", "2", "--warmup", "0",
                                "--num-comm-sms", "8", "--fixed-rail-tokens", "30"});
  results.group.num_ranks = 4;
  results.group.ranks_per_node = 2;
  results.group.transport = EPX_TRANSPORT_NCCL;
  results.group.max_recv_tokens_per_rank = 100;
  Measurements measurements(kLines.size());
  for (OperationSeries& series : measurements)
    series.call.assign(4, {{0, 8000}, {0, 8000}});
  Floors floors(kLines.size());
  floors[1].emplace();
  floors[1]->wire_us = 5;
  floors[1]->wire_variant = "ncclSend and ncclRecv of up to 700 bytes";
  const Survey survey{.sets = {{.rail_tokens = 20}, {.rail_tokens = 60}}, .ranks_per_node = 2};
  results.figures = compute_figures(measurements, floors, survey, results.options);
  REQUIRE(results.figures[1].rail);
  CHECK(results.figures[1].rail->needed == doctest::Approx(10 * 100));         // a rank's mean of 5 and 15 rows
  CHECK(results.figures[1].rail->sent == doctest::Approx(30 * (100 + 4 * 4))); // one rail of each rank
  CHECK_FALSE(results.figures[0].rail);
  CHECK(*results.figures[1].floor_ratio == doctest::Approx(1.6));
  CHECK_FALSE(results.figures[1].floor_ratio_on_sms); // was not measured
  const std::string table = to_table(results);
  for (const char* part : {"4 ranks, 2 nodes x 2 ranks", "sizes fixed at 30 tokens", "3480 bytes sent, 1000 needed: 3.480",
                           "rails 5.0 us (ncclSend and ncclRecv of up to 700 bytes)"})
    CHECK_MESSAGE(contains(table, part), table);
  CHECK_FALSE(contains(table, "HBM"));
  const nlohmann::json json = to_json(results);
  CHECK(json["group"]["nodes"] == 2);
  CHECK(json["config"]["fixed_rail_tokens"] == 30);
  CHECK(json["operations"]["dispatch"]["rail"]["needed_bytes"].get<double>() == doctest::Approx(1000));
  CHECK(json["operations"]["prepare"]["rail"].is_null());
  // 512 tokens, top-4 of 32: epx_handle_mem_size's bound of several nodes.
  CHECK(handle_memory_limit(results.options, results.group) ==
        12 * 3 * 512 * 4 + (4 * 4 + 16 * 2) * 512 + 12 * 100 + 8 * 4 * 32 + 65536);
  results.options.tokens = 1025;
  CHECK(handle_memory_limit(results.options, results.group) ==
        12 * 3 * 2048 * 4 + (4 * 4 + 16 * 2) * 2048 + 12 * 100 + 8 * 4 * 32 + 65536);

  // One node has no rails, and neither has the host transport.
  results.figures = compute_figures(measurements, floors, {.sets = survey.sets, .ranks_per_node = 4}, results.options);
  CHECK_FALSE(results.figures[1].rail);
  results.options.transport = EPX_TRANSPORT_HOST;
  measurements.resize(kNumOperations);
  results.figures = compute_figures(measurements, {}, survey, results.options);
  CHECK_FALSE(results.figures[1].rail);
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
