// SPDX-License-Identifier: Apache-2.0
// Computes the figures of the native way (--native), and its ratios to the measured library.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/stats.h"
#include "tools/ep_bench/workload/traffic.h"

namespace epx::bench {

// The timed calls of native_rows.h, and, beside the exchange of its rows, that of ragged_rows.h.
enum class NativeCall { Dispatch, DispatchRows, Combine, Exchange, Ragged };
inline constexpr std::array kNativeCalls{NativeCall::Dispatch, NativeCall::DispatchRows, NativeCall::Combine,
                                         NativeCall::Exchange, NativeCall::Ragged};
const char* name_of(NativeCall call); // "dispatch-nocounts"

using NativeWrongCounts = std::array<int64_t, kNativeCalls.size()>; // elements

struct NativeMeasurements {
  std::array<std::vector<Series>, kNativeCalls.size()> calls; // [call][rank][iteration]; [] of Ragged between nodes
  std::optional<NativeWrongCounts> wrong;                     // of all ranks, with --verify
};

// A NativeRatio is that of a native call's median time to the one of a line of the library that does the same.
struct NativeRatio {
  const char* line;
  double line_us = 0;
  double ratio = 0; // native / line
};

struct NativeCallFigures {
  const char* name;
  double median_us = 0; // of the slowest rank's of each iteration, as the others
  double p99_us = 0;
  double min_us = 0;
  int slowest_rank = 0;
  std::vector<NativeRatio> ratios;
  std::optional<int64_t> wrong;
};

struct NativeFigures {
  std::vector<NativeCallFigures> calls; // in the order of kNativeCalls; Ragged is missing between nodes
  // Bytes of rows that a rank sends in a call, the mean of ranks and iterations: to other ranks, and of these to other nodes.
  double sent_bytes = 0;
  double sent_to_nodes_bytes = 0;
};

// `figures` has the lines of the library in the expert-major layout, on GPUs.
NativeFigures compute_native_figures(const NativeMeasurements& measurements, const Figures& figures, const Survey& survey,
                                     const Options& options);

} // namespace epx::bench
