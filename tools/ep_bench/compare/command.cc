// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/compare/command.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "tools/ep_bench/compare/pairs.h"
#include "tools/ep_bench/compare/result_file.h"
#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

constexpr double kMaxPercent = 1e6;

struct CompareOptions {
  std::string a, b;
  std::optional<double> fail_if_slower; // percent
  bool any_machine = false;
};

std::string footer() {
  const Tolerance &host = tolerance_of(EPX_TRANSPORT_HOST), &nccl = tolerance_of(EPX_TRANSPORT_NCCL);
  return fmt::format(
      R"(A row is one line of one point. 'A us' and 'B us' are medians; '+- %' is half of their 95 % interval, with what another start
of the same build would change. 'B/A' is the ratio of the times, with its 95 % interval behind it. Verdicts, from that interval:
  slower, faster  all of it lies beyond the margin on one side: {} % on host, {} % on nccl
  same            all of it lies within {} % (host) or {} % (nccl) on either side
  ambiguous       anything else: measure more starts (--starts), or with less noise (--noise, --budget)
docs/ep_bench-json.md has the rule in full, and the fields of the files.
Exit status: 0; 1 with --fail-if-slower; 2 when the command line or a file is no good.)",
      100 * host.margin, 100 * nccl.margin, 100 * host.same, 100 * nccl.same);
}

double half_percent(const Estimate& estimate) {
  return 100 * std::max(estimate.interval_us.hi - estimate.us, estimate.us - estimate.interval_us.lo) / estimate.us;
}

std::string header(const ResultFile& a, const ResultFile& b) {
  std::string text;
  for (const auto& [name, file] : {std::pair("A", &a), std::pair("B", &b)})
    text += fmt::format("{}: {}, epx {}, {} start{}{}\n", name, file->name, file->library_version, file->num_starts,
                        file->num_starts == 1 ? "" : "s", file->is_complete ? "" : ", partial");
  for (const std::string& sentence : differences(a.machine, b.machine))
    text += fmt::format("note: {}\n", sentence);
  return text;
}

std::string table(const Pairs& pairs) {
  std::vector<size_t> widths;
  for (size_t column = 0; column < pairs.columns.size(); ++column) {
    widths.push_back(pairs.columns[column].size());
    for (const Row& row : pairs.rows)
      widths.back() = std::max(widths.back(), row.labels[column].size());
  }
  const auto left = [&](const std::vector<std::string>& labels) {
    std::string text;
    for (size_t column = 0; column < labels.size(); ++column)
      text += fmt::format("{:>{}}  ", labels[column], widths[column]);
    return text;
  };
  std::string text = fmt::format("\n{}{:<25}{:>11}{:>7}{:>11}{:>7}{:>8}{:>18}  {}\n", left(pairs.columns), "operation",
                                 "A us", "+- %", "B us", "+- %", "B/A", "95 % interval", "verdict");
  for (const Row& row : pairs.rows)
    text += fmt::format("{}{:<25}{:>11.1f}{:>7.1f}{:>11.1f}{:>7.1f}{:>8.3f}{:>18}  {}\n", left(row.labels), row.line,
                        row.a.us, half_percent(row.a), row.b.us, half_percent(row.b), row.comparison.ratio,
                        fmt::format("{:.3f} to {:.3f}", row.comparison.ratio_interval.lo, row.comparison.ratio_interval.hi),
                        to_string(row.comparison.verdict));
  return text;
}

std::string summary(const Pairs& pairs, const ResultFile& a, const ResultFile& b) {
  std::string text = "\n";
  for (const std::string& sentence : pairs.unpaired)
    text += sentence + "\n";
  for (const auto& [name, file] : {std::pair("A", &a), std::pair("B", &b)}) {
    int64_t unconverged = 0;
    for (const Point& point : file->points)
      for (const auto& [line, result] : point.lines)
        unconverged += result.num_unconverged;
    if (unconverged > 0)
      text += fmt::format("in {}: {} medians ended by the time budget, above --noise\n", name, unconverged);
  }
  std::vector<std::string> counts;
  for (const Verdict verdict : {Verdict::Slower, Verdict::Faster, Verdict::Same, Verdict::Ambiguous})
    counts.push_back(
        fmt::format("{} {}", std::ranges::count(pairs.rows, verdict, [](const Row& row) { return row.comparison.verdict; }),
                    to_string(verdict)));
  return text + fmt::format("{} of {} rows\n", fmt::join(counts, ", "), pairs.rows.size());
}

// Returns the rows that are slower by more than `percent`, the slowest first.
std::vector<const Row*> slower_rows(const Pairs& pairs, double percent) {
  std::vector<const Row*> rows;
  for (const Row& row : pairs.rows)
    if (row.comparison.verdict == Verdict::Slower && row.comparison.ratio > 1 + percent / 100) rows.push_back(&row);
  std::ranges::stable_sort(rows, std::ranges::greater(), [](const Row* row) { return row->comparison.ratio; });
  return rows;
}

int compare_files(const CompareOptions& options) {
  const ResultFile a = read_result_file(options.a);
  const ResultFile b = read_result_file(options.b);
  const Pairs pairs = pair(a, b, options.any_machine);
  fmt::print("{}{}{}", header(a, b), table(pairs), summary(pairs, a, b));
  if (!options.fail_if_slower) return 0;
  const std::vector<const Row*> slower = slower_rows(pairs, *options.fail_if_slower);
  if (slower.empty()) return 0;
  std::fflush(stdout);
  fmt::print(stderr, "ep_bench: {} of {} rows are slower by more than {} %, most of all {}: by {:.1f} %\n", slower.size(),
             pairs.rows.size(), *options.fail_if_slower, name_of(*slower.front()),
             100 * (slower.front()->comparison.ratio - 1));
  return kExitFailure;
}

} // namespace

int run_compare(std::span<const char* const> arguments) {
  CompareOptions options;
  CLI::App app("Compares two files of ep_bench --json: whether each line of each point is faster, slower or the same in B.",
               "ep_bench compare");
  app.footer(footer());
  app.add_option("A", options.a, "File of the build before")->required();
  app.add_option("B", options.b, "File of the build after")->required();
  app.add_option("--fail-if-slower", options.fail_if_slower,
                 "Exit status 1 where a row is slower, and its ratio by more than this, percent");
  app.add_flag("--any-machine", options.any_machine, "Compare files of other models of CPU or GPU, too");
  try {
    app.parse(static_cast<int>(arguments.size()), arguments.data());
    if (const std::optional<double> percent = options.fail_if_slower;
        percent && !(*percent >= 0 && *percent <= kMaxPercent))
      throw UsageError(
          fmt::format("--fail-if-slower is {}; it must be a percentage between 0 and {}", *percent, kMaxPercent));
    return compare_files(options);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const std::exception& error) { // CLI::ParseError, UsageError
    fmt::print(stderr, "ep_bench: {}\n", error.what());
    return kExitUsage;
  }
}

} // namespace epx::bench
