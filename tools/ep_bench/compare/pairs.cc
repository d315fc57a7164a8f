// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/compare/pairs.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/lines.h"

namespace epx::bench {
namespace {

using nlohmann::json;

std::string text_of(const json& config, const std::string& field) {
  const auto found = config.find(field);
  if (found == config.end()) return "-";
  return found->is_string() ? found->get<std::string>() : found->dump();
}

std::vector<std::string> labels_of(const json& config, const std::vector<std::string>& columns) {
  std::vector<std::string> labels(columns.size());
  std::ranges::transform(columns, labels.begin(), [&](const std::string& column) { return text_of(config, column); });
  return labels;
}

// A field becomes a column when it tells points apart that the columns so far do not.
std::vector<std::string> columns_of(const ResultFile& a, const ResultFile& b) {
  std::set<json> configs;
  for (const ResultFile* file : {&a, &b})
    for (const Point& point : file->points)
      configs.insert(point.config);
  std::set<std::string> fields;
  for (const json& config : configs)
    for (const auto& [field, value] : config.items())
      fields.insert(field);

  std::vector<std::string> columns{"tokens", "layout"};
  const auto num_told_apart = [&] {
    std::set<std::vector<std::string>> labels;
    for (const json& config : configs)
      labels.insert(labels_of(config, columns));
    return labels.size();
  };
  size_t told_apart = num_told_apart();
  for (const std::string& field : fields) {
    if (told_apart == configs.size()) break;
    columns.push_back(field);
    const size_t now = num_told_apart();
    if (now == told_apart) columns.pop_back();
    told_apart = now;
  }
  return columns;
}

std::string name_of_point(const Point& point, const std::vector<std::string>& columns) {
  std::string text;
  for (const std::string& column : columns)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", column, text_of(point.config, column));
  return text;
}

const Point* find(const ResultFile& file, const json& config) {
  const auto found = std::ranges::find(file.points, config, &Point::config);
  return found == file.points.end() ? nullptr : &*found;
}

// Returns the names of the lines of a point in the order of ep_bench's table; lines of a later version come last.
std::vector<std::string> lines_in_order(const Point& point) {
  std::vector<std::string> names;
  for (const auto& [name, line] : point.lines)
    names.push_back(name);
  const bool is_rank_major = point.config.at("layout") != "expert-major";
  const std::span<const Line> known =
      is_rank_major ? std::span<const Line>(kRankMajorLines) : std::span<const Line>(kLines);
  std::ranges::stable_sort(
      names, {}, [&](const std::string& name) { return std::ranges::find(known, name, &Line::name) - known.begin(); });
  return names;
}

void require_same_run(const ResultFile& a, const ResultFile& b) {
  const auto of_run = [](const ResultFile& file) {
    return fmt::format("{} ranks, {} of each node, transport {}", file.num_ranks, file.ranks_per_node,
                       file.transport == EPX_TRANSPORT_NCCL ? "nccl" : "host");
  };
  if (of_run(a) != of_run(b))
    throw UsageError(fmt::format("'{}' is of {}, and '{}' of {}; only runs of the same kind can be compared", a.name,
                                 of_run(a), b.name, of_run(b)));
}

void require_same_machine(const ResultFile& a, const ResultFile& b) {
  const auto of_machine = [](const ResultFile& file) {
    return fmt::format("CPU '{}', GPU {}", file.machine.cpu,
                       file.machine.gpu ? fmt::format("'{}'", *file.machine.gpu) : std::string("none"));
  };
  if (of_machine(a) != of_machine(b))
    throw UsageError(fmt::format("'{}' is of another machine ({}) than '{}' ({}); --any-machine compares them all the same",
                                 a.name, of_machine(a), b.name, of_machine(b)));
}

std::string why_no_rows(const ResultFile& a, const ResultFile& b) {
  if (a.points.empty() || b.points.empty()) return fmt::format("'{}' has no point", (a.points.empty() ? a : b).name);
  const json &of_a = a.points.front().config, &of_b = b.points.front().config;
  for (const auto& [field, value] : of_a.items())
    if (text_of(of_a, field) != text_of(of_b, field))
      return fmt::format("their first points differ in {}: {} and {}", field, text_of(of_a, field), text_of(of_b, field));
  return "no line of a point is complete in both";
}

// Appends what only one of the files has of a point.
void list_unpaired(const Point& point, const Point* other, const char* name, const std::vector<std::string>& columns,
                   std::vector<std::string>& unpaired) {
  const std::string of_point = name_of_point(point, columns);
  if (!point.failure.empty()) unpaired.push_back(fmt::format("in {}: {}: {}", name, of_point, point.failure));
  if (other == nullptr) {
    if (!point.lines.empty()) unpaired.push_back(fmt::format("only in {}: {}", name, of_point));
    return;
  }
  if (other->lines.empty()) return; // it failed, which the other file's turn says
  for (const std::string& line : lines_in_order(point))
    if (!other->lines.contains(line)) unpaired.push_back(fmt::format("only in {}: {}, {}", name, of_point, line));
}

} // namespace

Pairs pair(const ResultFile& a, const ResultFile& b, bool any_machine) {
  require_same_run(a, b);
  if (!any_machine) require_same_machine(a, b);
  const Tolerance& tolerance = tolerance_of(a.transport);
  Pairs pairs;
  pairs.columns = columns_of(a, b);
  for (const Point& of_a : a.points) {
    const Point* const of_b = find(b, of_a.config);
    list_unpaired(of_a, of_b, "A", pairs.columns, pairs.unpaired);
    if (of_b == nullptr) continue;
    for (const std::string& line : lines_in_order(of_a)) {
      const auto line_of_b = of_b->lines.find(line);
      if (line_of_b == of_b->lines.end()) continue;
      const Estimate estimate_of_a = estimate(of_a.lines.at(line).starts, tolerance);
      const Estimate estimate_of_b = estimate(line_of_b->second.starts, tolerance);
      pairs.rows.push_back({.labels = labels_of(of_a.config, pairs.columns),
                            .line = line,
                            .a = estimate_of_a,
                            .b = estimate_of_b,
                            .comparison = compare(estimate_of_a, estimate_of_b, tolerance)});
    }
  }
  for (const Point& of_b : b.points)
    list_unpaired(of_b, find(a, of_b.config), "B", pairs.columns, pairs.unpaired);
  if (pairs.rows.empty())
    throw UsageError(fmt::format("'{}' and '{}' have no line in common: {}", a.name, b.name, why_no_rows(a, b)));
  return pairs;
}

std::vector<std::string> differences(const Machine& a, const Machine& b) {
  std::vector<std::string> sentences;
  const auto add = [&](const char* what, const auto& of_a, const auto& of_b) {
    if (of_a != of_b) sentences.push_back(fmt::format("{} is {} in A and {} in B", what, of_a, of_b));
  };
  add("host", a.host, b.host);
  add("cpu", a.cpu, b.cpu);
  add("cores", a.cores, b.cores);
  add("gpu", a.gpu.value_or("none"), b.gpu.value_or("none"));
  add("driver", a.driver.value_or("none"), b.driver.value_or("none"));
  add("nccl", a.nccl.value_or("none"), b.nccl.value_or("none"));
  return sentences;
}

std::string name_of(const Row& row) {
  return fmt::format("{}, {}", fmt::join(row.labels, ", "), row.line);
}

} // namespace epx::bench
