// SPDX-License-Identifier: Apache-2.0
// Measures the points of a sweep one after another.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/progress.h"
#include "tools/ep_bench/report.h"

namespace epx::bench {

enum class PointStatus { NotRun, Failed, Complete };
const char* to_string(PointStatus status); // "not run"

struct PointResult {
  Options options;
  PointStatus status = PointStatus::NotRun;
  std::string error;              // Failed
  int exit_code = 0;              // Failed
  std::optional<Results> results; // Complete
};

// Returns what the points of a sweep differ in, "rank-major, 64 tokens"; the tokens of a sweep of one point.
std::string point_name(const Options& point, const Sweep& sweep);

// Measures one point: collective, and throws AgreedError where it fails on all ranks together.
using MeasurePoint = std::function<Results(const Options&)>;
// Takes all points after each of them. `is_last` is true after the last one, and where a run ends early: the ranks may no longer
// act together then, so it must wait for no rank.
using AfterPoint = std::function<void(std::span<const PointResult>, bool is_last)>;

// Collective. A point that fails on all ranks together is marked, and the next one runs; but the only point of a run throws its
// AgreedError. A signal throws AgreedError, and a rank that no longer answers another exception, after after_point.
std::vector<PointResult> run_sweep(const Sweep& sweep, const Peers& peers, const MeasurePoint& measure,
                                   const AfterPoint& after_point, Progress& progress);

// Returns the exit status of a run: 0 where all points are complete and passed().
int exit_status(std::span<const PointResult> points);

// Returns the table of a sweep, a row for each point and line; of a run of one point that of report.h, or "" where it failed.
std::string to_table(const Sweep& sweep, std::span<const PointResult> points);

} // namespace epx::bench
