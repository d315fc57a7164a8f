// SPDX-License-Identifier: Apache-2.0
// Computes the figures that ep_bench reports from times and row counts.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/ep_bench/measure.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/row_format.h"
#include "tools/ep_bench/stats.h"
#include "tools/ep_bench/workload/traffic.h"

namespace epx::bench {

// CopyFigures are those of a plain memcpy of as many rows as the operation writes, by all ranks at once.
struct CopyFigures {
  double median_us = 0; // from the first rank's begin to the last rank's end
  double gbps = 0;      // all ranks together
  double ratio = 0;     // bytes/s that the operation writes / bytes/s of this
};

// The speed-of-light bound (--floor) is the time that the hardware needs for the operation's rows alone, on all ranks at once;
// see floor_plan.h.
struct FloorFigures {
  double wire_us = 0;                    // each row stored once to each rank that it must reach; or rail_floor.h's time
  double hbm_us = 0;                     // local reads and writes; of one node
  std::string wire_variant, hbm_variant; // the fastest of the kernels that were tried; or what NCCL moves
  std::map<std::string, double> wire_us_of_variants{}; // of all kernels that were tried; of one node
  double wire_us_on_sms = 0;                           // the same on no more than options.num_comm_sms SMs; 0: not asked
  double hbm_us_on_sms = 0;

  double us() const { return wire_us > hbm_us ? wire_us : hbm_us; }
  double us_on_sms() const { return wire_us_on_sms > hbm_us_on_sms ? wire_us_on_sms : hbm_us_on_sms; }
};
using Floors = std::vector<std::optional<FloorFigures>>; // by line; empty where not measured

// OperationFigures are those of one line. Times are the slowest rank's of each iteration; rows are means over iterations and
// ranks; 1 GB = 1e9 bytes.
struct OperationFigures {
  double median_us = 0;
  double p99_us = 0;
  double min_us = 0;
  int slowest_rank = 0;
  Interval interval_us; // 95 % interval of the median
  int64_t samples = 0;
  int64_t outliers = 0;                // among the samples, see count_outliers()
  std::optional<int64_t> throttled;    // samples while a GPU was throttled; empty where nothing tells
  bool converged = false;              // interval_us lies within the percentage of --noise
  std::optional<double> start_skew_us; // median time from the first rank's begin to the last's; ranks on one machine
  // These are empty where the line does not move the rows of one operation.
  double logical_rows = 0;
  double wire_rows = 0;
  double written_rows = 0;
  std::optional<RowBytes> row_bytes;
  std::optional<double> logical_gbps;       // per rank
  std::optional<double> wire_gbps;          // per rank
  std::optional<CopyFigures> copy;          // host transport, unless no row was written
  std::optional<FloorFigures> floor;        // with --floor
  std::optional<double> floor_ratio;        // median time / the floor's
  std::optional<double> floor_ratio_on_sms; // median time / the floor's on options.num_comm_sms SMs
  std::optional<RailBytes> rail;            // mean of a rank and iteration; groups of several nodes on GPUs
};

using Figures = std::vector<OperationFigures>; // in the order of lines_of(options)

// Returns half of the interval of the median, the longer half, in percent of the median.
double noise_percent(const OperationFigures& figures);

// `options` have the iterations that took place.
Figures compute_figures(const Measurements& measurements, const Floors& floors, const Survey& survey,
                        const Options& options);

} // namespace epx::bench
