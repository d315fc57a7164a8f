// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/sweep.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/interrupt.h"

namespace epx::bench {
namespace {

template <typename Value>
bool differs(const Sweep& sweep, Value&& value) {
  return std::ranges::any_of(sweep.points, [&](const Options& point) { return value(point) != value(sweep.common()); });
}

void mark_failed(PointResult& point, int exit_code, const std::string& error) {
  point.status = PointStatus::Failed;
  point.exit_code = exit_code;
  point.error = error;
}

// Says what a reader of a row should know.
std::string state_of(const OperationFigures& figures, std::optional<int64_t> wrong) {
  std::vector<std::string> parts;
  if (wrong.value_or(0) != 0) parts.push_back(fmt::format("{} wrong", *wrong));
  if (!figures.converged) parts.emplace_back("noisy");
  if (figures.throttled.value_or(0) != 0) parts.push_back(fmt::format("{} throttled", *figures.throttled));
  if (figures.outliers != 0) parts.push_back(fmt::format("{} outliers", figures.outliers));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string row(const std::string& point, size_t width, const Results& results, size_t line) {
  const OperationFigures& figures = results.figures[line];
  const auto wrong = results.wrong && line < results.wrong->size() ? std::optional((*results.wrong)[line]) : std::nullopt;
  const std::string text = fmt::format(
      "{:<{}}  {:<25}{:>11.1f}{:>9.2f}{:>11.1f}{:>11.1f}{:>9}{:>14}{:>11}{:>8}  {}", point, width,
      lines_of(results.options)[line].name, figures.median_us, noise_percent(figures), figures.p99_us, figures.min_us,
      figures.samples, figures.logical_gbps ? fmt::format("{:.3f}", *figures.logical_gbps) : "-",
      figures.floor ? fmt::format("{:.1f}", figures.floor->us()) : "-",
      figures.floor_ratio ? fmt::format("{:.3f}", *figures.floor_ratio) : "-", state_of(figures, wrong));
  return text.substr(0, text.find_last_not_of(' ') + 1) + '\n';
}

} // namespace

const char* to_string(PointStatus status) {
  switch (status) {
  case PointStatus::NotRun:
    return "not run";
  case PointStatus::Failed:
    return "failed";
  case PointStatus::Complete:
    break;
  }
  return "complete";
}

std::string point_name(const Options& point, const Sweep& sweep) {
  std::vector<std::string> parts;
  if (differs(sweep, [](const Options& options) { return to_string(options.routing); }))
    parts.push_back(to_string(point.routing));
  if (differs(sweep, [](const Options& options) { return options.layout; })) parts.emplace_back(to_string(point.layout));
  if (differs(sweep, [](const Options& options) { return options.num_comm_sms; }))
    parts.push_back(point.num_comm_sms == 0 ? "default SMs" : fmt::format("{} SMs", point.num_comm_sms));
  if (parts.empty() || differs(sweep, [](const Options& options) { return options.tokens; }))
    parts.push_back(fmt::format("{} tokens", point.tokens));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::vector<PointResult> run_sweep(const Sweep& sweep, const Peers& peers, const MeasurePoint& measure,
                                   const AfterPoint& after_point, Progress& progress) {
  std::vector<PointResult> points;
  for (const Options& options : sweep.points)
    points.push_back({.options = options, .error = {}, .results = {}});
  const auto end_early = [&](PointResult& point, int exit_code, const std::string& error) {
    mark_failed(point, exit_code, error);
    progress.finish();
    after_point(points, true);
  };
  for (PointResult& point : points) {
    progress.begin(point_name(point.options, sweep));
    try {
      peers.barrier(); // a signal may have come between points
      point.results = measure(point.options);
      point.status = PointStatus::Complete;
    } catch (const AgreedError& error) {
      if (error.exit_code() > kExitSignal || points.size() == 1) {
        end_early(point, error.exit_code(), error.what());
        throw;
      }
      mark_failed(point, error.exit_code(), error.what());
    } catch (const std::exception& error) {
      end_early(point, kExitFailure, describe(error));
      throw;
    }
    progress.end(point.error);
    const bool is_last = &point == &points.back();
    if (is_last) progress.finish();
    const Failure unwritten = attempt([&] { after_point(points, is_last); });
    try {
      peers.agree(unwritten);
    } catch (const std::exception&) { // perhaps a signal, or the loss of a rank, while the file was written
      if (!is_last && unwritten.exit_code == 0) after_point(points, true);
      throw;
    }
  }
  return points;
}

int exit_status(std::span<const PointResult> points) {
  const auto is_failed = [](const PointResult& point) { return point.status != PointStatus::Complete; };
  if (std::ranges::all_of(points, is_failed)) return points.front().exit_code;
  if (std::ranges::any_of(points, is_failed)) return kExitFailure;
  return std::ranges::all_of(points, [](const PointResult& point) { return passed(*point.results); }) ? 0 : kExitFailure;
}

std::string to_table(const Sweep& sweep, std::span<const PointResult> points) {
  if (points.size() == 1) return points.front().results ? to_table(*points.front().results) : std::string();
  size_t width = std::string_view("point").size();
  for (const PointResult& point : points)
    width = std::max(width, point_name(point.options, sweep).size());
  std::string text;
  const auto first = std::ranges::find(points, PointStatus::Complete, &PointResult::status);
  if (first != points.end()) {
    const Options& options = first->options;
    const epx_group_info& group = first->results->group;
    text = fmt::format(
        "ep_bench {}: {} ranks, transport {}, rows of {} {}{}{}, top-{} of {} experts, combine {}{}\n",
        version_string(first->results->library_version), group.num_ranks, to_string(options.transport), options.hidden,
        to_string(options.dtype),
        options.format() == NamedFormat::None ? "" : fmt::format(", those of dispatch in {}", row_format_text(options)),
        options.sum_format == NamedFormat::None ? "" : fmt::format(", partial sums in {}", to_string(options.sum_format)),
        options.top_k, options.experts, to_string(options.combine_precision),
        options.graph ? ", calls replayed from CUDA graphs" : "");
  }
  fmt::format_to(std::back_inserter(text), "\n{:<{}}  {:<25}{:>11}{:>9}{:>11}{:>11}{:>9}{:>14}{:>11}{:>8}  {}\n", "point",
                 width, "operation", "median us", "noise %", "p99 us", "min us", "samples", "logical GB/s", "floor us",
                 "ratio", "state");
  for (const PointResult& point : points) {
    const std::string name = point_name(point.options, sweep);
    if (point.status == PointStatus::Complete)
      for (size_t line = 0; line < point.results->figures.size(); ++line)
        text += row(name, width, *point.results, line);
    else
      fmt::format_to(std::back_inserter(text), "{:<{}}  {}{}{}\n", name, width, to_string(point.status),
                     point.error.empty() ? "" : ": ", point.error);
  }
  return text;
}

} // namespace epx::bench
