// SPDX-License-Identifier: Apache-2.0
// The timed loop of the host transport is here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/sampler.h"
#include "tools/ep_bench/stats.h"
#include "tools/ep_bench/workload/traffic.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {

// OperationSeries has the times of one operation.
struct OperationSeries {
  std::vector<Series> call; // [rank][iteration]
  std::vector<Series> copy; // [rank][iteration], a plain memcpy of as many rows; empty where there is none
};

using Measurements = std::vector<OperationSeries>; // in the order of lines_of(options)

// Runs all operations of the layout on the host transport, as often as the sampler says, and keeps the times of the timed
// iterations. Iteration i takes input set i modulo the number of sets. A memcpy of as many rows as the operation writes and a
// barrier precede each operation; its time includes neither. The call is collective.
Measurements measure(MeasuredGroup& measured, std::span<const InputSet> sets, const Survey& survey, const Options& options,
                     const Peers& peers, Sampler& sampler);

// Returns the durations of all ranks, [rank][i], from the same number of each. The call is collective.
std::vector<Series> gather_durations(std::span<const int64_t> mine_ns, const Peers& peers);

} // namespace epx::bench
