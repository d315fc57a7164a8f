// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/native/native_figures.h"

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "tools/ep_bench/lines.h"

namespace epx::bench {
namespace {

// The native dispatch begins with the counts, as the library does in prepare.
std::vector<epx_operation> operations_like(NativeCall call) {
  switch (call) {
  case NativeCall::Dispatch:
    return {EPX_OP_DISPATCH, EPX_OP_PREPARE_DISPATCH};
  case NativeCall::DispatchRows:
    return {EPX_OP_DISPATCH};
  case NativeCall::Combine:
    return {EPX_OP_COMBINE};
  case NativeCall::Exchange: // whose ratio is to another of these calls
  case NativeCall::Ragged:
    break;
  }
  return {};
}

NativeCallFigures figures_of(NativeCall call, const std::vector<Series>& series, const Figures& figures) {
  const std::vector<double> times = slowest_us(series);
  NativeCallFigures native{.name = name_of(call),
                           .median_us = median(times),
                           .p99_us = percentile(times, 99),
                           .min_us = minimum(times),
                           .slowest_rank = most_often_slowest(series),
                           .ratios = {},
                           .wrong = {}};
  for (const epx_operation operation : operations_like(call)) {
    const auto line = std::ranges::find(kLines, operation, &Line::operation);
    const double line_us = figures[static_cast<size_t>(line - kLines.begin())].median_us;
    native.ratios.push_back({line->name, line_us, native.median_us / line_us});
  }
  return native;
}

} // namespace

const char* name_of(NativeCall call) {
  switch (call) {
  case NativeCall::Dispatch:
    return "dispatch";
  case NativeCall::DispatchRows:
    return "dispatch-nocounts";
  case NativeCall::Combine:
    return "combine";
  case NativeCall::Exchange:
    return "exchange";
  case NativeCall::Ragged:
    break;
  }
  return "ragged_all_to_all";
}

NativeFigures compute_native_figures(const NativeMeasurements& measurements, const Figures& figures, const Survey& survey,
                                     const Options& options) {
  NativeFigures native;
  for (size_t call = 0; call < kNativeCalls.size(); ++call) {
    if (measurements.calls[call].empty()) continue;
    native.calls.push_back(figures_of(kNativeCalls[call], measurements.calls[call], figures));
    if (measurements.wrong) native.calls.back().wrong = (*measurements.wrong)[call];
  }
  const auto of = [&](NativeCall call) {
    return std::ranges::find(native.calls, std::string_view(name_of(call)), &NativeCallFigures::name);
  };
  if (const auto ragged = of(NativeCall::Ragged), exchange = of(NativeCall::Exchange); ragged != native.calls.end())
    exchange->ratios.push_back({ragged->name, ragged->median_us, exchange->median_us / ragged->median_us});
  const double samples = static_cast<double>(options.iterations) * static_cast<double>(measurements.calls[0].size());
  const double bytes = static_cast<double>(row_bytes(options)) / samples;
  for (int iteration = options.warmup; iteration < options.warmup + options.iterations; ++iteration) {
    const Traffic& all = survey.sets[static_cast<size_t>(iteration) % survey.sets.size()];
    native.sent_bytes += static_cast<double>(all.remote_routes) * bytes;
    native.sent_to_nodes_bytes += static_cast<double>(all.rail_routes) * bytes;
  }
  return native;
}

} // namespace epx::bench
