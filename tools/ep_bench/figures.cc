// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/figures.h"

#include <algorithm>
#include <span>

#include "tools/ep_bench/stats.h"

namespace epx::bench {
namespace {

// One byte per microsecond is 1e6 bytes/s.
double gbps(double bytes, double us) {
  return bytes / us / 1e3;
}

struct MeanRows {
  double logical = 0, wire = 0, written = 0; // per rank and timed iteration
};

MeanRows mean_rows(epx_operation operation, const Survey& survey, const Options& options, size_t num_ranks) {
  MeanRows rows;
  for (int iteration = options.warmup; iteration < options.warmup + options.iterations; ++iteration) {
    const Traffic& all = survey.sets[iteration % survey.sets.size()];
    rows.logical += static_cast<double>(logical_rows(operation, all, options.layout));
    rows.wire += static_cast<double>(wire_rows(operation, all, options.combine_precision));
    rows.written += static_cast<double>(written_rows(operation, all, options.combine_precision, options.layout));
  }
  const double samples = static_cast<double>(options.iterations) * static_cast<double>(num_ranks);
  return {rows.logical / samples, rows.wire / samples, rows.written / samples};
}

// Returns nothing for a group of one node.
std::optional<RailBytes> mean_rail_bytes(const Line& line, const Survey& survey, const Options& options, int num_ranks) {
  const bool has_rails = survey.ranks_per_node > 0 && survey.ranks_per_node < num_ranks;
  if (!has_rails || options.transport != EPX_TRANSPORT_NCCL) return std::nullopt;
  RailBytes mean;
  const double samples = static_cast<double>(options.iterations) * num_ranks;
  for (int iteration = options.warmup; iteration < options.warmup + options.iterations; ++iteration) {
    const Traffic& all = survey.sets[iteration % survey.sets.size()];
    const RailBytes bytes = rail_bytes(line, all, options, num_ranks, survey.ranks_per_node);
    mean.needed += bytes.needed / samples;
    mean.sent += bytes.sent / samples;
  }
  return mean;
}

OperationFigures figures_of(const Line& line, const OperationSeries& series, const Survey& survey, const Options& options) {
  const std::vector<double> times = slowest_us(series.call);
  const double num_ranks = static_cast<double>(series.call.size());
  const MeanRows rows = mean_rows(line.operation, survey, options, series.call.size());

  OperationFigures figures;
  figures.median_us = median(times);
  figures.p99_us = percentile(times, 99);
  figures.min_us = minimum(times);
  figures.slowest_rank = most_often_slowest(series.call);
  figures.interval_us = median_interval(times);
  figures.samples = static_cast<int64_t>(times.size());
  figures.outliers = count_outliers(times);
  figures.converged = is_converged(times, options.noise.value_or(NoiseTarget{}).percent);
  if (!line.moves_rows()) return figures;
  const RowBytes bytes = row_bytes_of(options, line.operation);
  const auto received = static_cast<double>(bytes.received);
  figures.row_bytes = bytes;
  figures.logical_rows = rows.logical;
  figures.wire_rows = rows.wire;
  figures.written_rows = rows.written;
  figures.rail = mean_rail_bytes(line, survey, options, static_cast<int>(series.call.size()));
  figures.logical_gbps = gbps(rows.logical * received, figures.median_us);
  figures.wire_gbps = gbps(rows.wire * static_cast<double>(bytes.wire), figures.median_us);
  if (!series.copy.empty() && rows.written > 0) {
    CopyFigures copy;
    copy.median_us = median(span_us(series.copy));
    copy.gbps = gbps(rows.written * received * num_ranks, copy.median_us);
    copy.ratio = gbps(rows.written * received * num_ranks, figures.median_us) / copy.gbps;
    figures.copy = copy;
  }
  return figures;
}

} // namespace

double noise_percent(const OperationFigures& figures) {
  const double half = std::max(figures.interval_us.hi - figures.median_us, figures.median_us - figures.interval_us.lo);
  return 100 * half / figures.median_us;
}

Figures compute_figures(const Measurements& measurements, const Floors& floors, const Survey& survey,
                        const Options& options) {
  Figures figures;
  const std::span<const Line> lines = lines_of(options);
  // Ranks that copy share a machine, and so a clock.
  const bool one_machine =
      std::ranges::any_of(measurements, [](const OperationSeries& series) { return !series.copy.empty(); });
  for (size_t line = 0; line < measurements.size(); ++line) {
    figures.push_back(figures_of(lines[line], measurements[line], survey, options));
    if (one_machine) figures.back().start_skew_us = median(start_skew_us(measurements[line].call));
    if (floors.empty() || !floors[line]) continue;
    figures.back().floor = floors[line];
    figures.back().floor_ratio = figures.back().median_us / floors[line]->us();
    if (options.num_comm_sms > 0 && floors[line]->us_on_sms() > 0)
      figures.back().floor_ratio_on_sms = figures.back().median_us / floors[line]->us_on_sms();
  }
  return figures;
}

} // namespace epx::bench
