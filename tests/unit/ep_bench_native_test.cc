// SPDX-License-Identifier: Apache-2.0
// The figures of the native way (--native) are in closed form.
#include <cstdint>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/native/native_figures.h"
#include "tools/ep_bench/report.h"

namespace epx::bench {
namespace {

TEST_CASE("ep_bench native way: figures and report") {
  if (!built_with_cuda() || !built_with_moe()) return;
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
  native.calls[3].assign(4, {{0, 12'000}, {0, 12'000}});
  native.calls[4].assign(4, {{0, 8000}, {0, 8000}});
  results.native = compute_native_figures(native, results.figures, survey, results.options);

  CHECK(results.native->sent_bytes == doctest::Approx((40 + 80) * 100 / (2 * 4.0)));
  CHECK(results.native->sent_to_nodes_bytes == doctest::Approx((24 + 40) * 100 / (2 * 4.0)));
  REQUIRE(results.native->calls.size() == 5);
  const NativeCallFigures& dispatch = results.native->calls[0];
  REQUIRE(dispatch.ratios.size() == 2);
  CHECK(dispatch.ratios[0].ratio == doctest::Approx(5));        // dispatch takes 2 us
  CHECK(dispatch.ratios[1].ratio == doctest::Approx(10.0 / 8)); // prepare_dispatch takes 8
  CHECK(results.native->calls[1].ratios[0].ratio == doctest::Approx(2.5));
  CHECK(results.native->calls[2].median_us == doctest::Approx(9));
  CHECK(results.native->calls[2].slowest_rank == 3);
  CHECK(results.native->calls[2].ratios[0].ratio == doctest::Approx(3)); // combine takes 3 us
  CHECK_FALSE(dispatch.wrong);
  REQUIRE(results.native->calls[3].ratios.size() == 1);
  CHECK(results.native->calls[3].ratios[0].ratio == doctest::Approx(1.5)); // ragged_all_to_all takes 8 us
  CHECK(results.native->calls[4].ratios.empty());

  const std::string table = to_table(results);
  for (const char* part : {"a rank sends 1500 bytes of rows in a call, 800 of them to other nodes", "native/epx",
                           "dispatch-nocounts", "5.000", "1.250", "2.500", "3.000", "ragged_all_to_all", "1.500"})
    CHECK_MESSAGE(contains(table, part), table);
  nlohmann::json json = to_json(results);
  CHECK(json["config"]["native"] == true);
  CHECK(json["native"]["calls"]["dispatch"]["ratio_to"]["prepare_dispatch"].get<double>() == doctest::Approx(1.25));
  CHECK(json["native"]["calls"]["combine"]["wrong"].is_null());
  CHECK(json["native"]["sent_to_nodes_bytes"].get<double>() == doctest::Approx(800));
  CHECK(passed(results));

  native.wrong = NativeWrongCounts{0, 0, 7, 0, 0};
  results.native = compute_native_figures(native, results.figures, survey, results.options);
  CHECK_FALSE(passed(results));
  CHECK(to_json(results)["native"]["calls"]["combine"]["wrong"] == 7);
  native.calls[4].clear(); // between nodes
  results.native = compute_native_figures(native, results.figures, survey, results.options);
  CHECK(results.native->calls.size() == 4);
  CHECK(results.native->calls[3].ratios.empty());
  results.native.reset();
  CHECK(to_json(results)["native"].is_null());
  CHECK_FALSE(contains(to_table(results), "native"));
}

} // namespace
} // namespace epx::bench
