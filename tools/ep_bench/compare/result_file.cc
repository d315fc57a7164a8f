// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/compare/result_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include "tools/ep_bench/document.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/workload/text_file.h"

namespace epx::bench {
namespace {

using nlohmann::json;

// These fields of a config say how often and beside what the calls were measured, and not what a call does. --block does change
// the calls: its router selects the routing.
constexpr std::array kUnpairedFields{"iters", "warmup", "noise_percent", "budget_s", "verify", "floor", "native"};

constexpr size_t kMaxShownBytes = 60;

std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kMaxShownBytes) text = text.substr(0, kMaxShownBytes) + "...";
  return text;
}

// A Field is a value in a file, with the place that a sentence names.
class Field {
public:
  Field(const json& value, const std::string& file, std::string place)
      : value_(value), file_(file), place_(std::move(place)) {}

  const json& value() const { return value_; }
  const std::string& place() const { return place_; }

  [[noreturn]] void refuse(const std::string& expected) const {
    throw UsageError(fmt::format("'{}': {} is {}; it must be {}", file_, place_, shown(value_), expected));
  }

  bool has(const char* name) const { return value_.is_object() && value_.contains(name); }

  Field at(const char* name) const {
    if (!value_.is_object()) refuse("an object");
    const auto found = value_.find(name);
    if (found == value_.end())
      throw UsageError(fmt::format("'{}': {} has no field '{}'", file_, place_.empty() ? "the document" : place_, name));
    return {*found, file_, place_.empty() ? name : fmt::format("{}.{}", place_, name)};
  }

  Field operator[](size_t index) const { return {value_[index], file_, fmt::format("{}[{}]", place_, index)}; }

  // Returns the number of elements.
  size_t size() const {
    if (!value_.is_array()) refuse("an array");
    return value_.size();
  }

  std::string text() const {
    if (!value_.is_string()) refuse("a string");
    return value_.get<std::string>();
  }

  std::optional<std::string> text_or_null() const { return value_.is_null() ? std::nullopt : std::optional(text()); }

  std::string one_of(std::initializer_list<std::string_view> allowed) const {
    if (!value_.is_string() || std::ranges::find(allowed, value_.get_ref<const std::string&>()) == allowed.end())
      refuse(fmt::format("one of {}", fmt::join(allowed, ", ")));
    return value_.get<std::string>();
  }

  int64_t count(int64_t min) const {
    constexpr double kMax = 1e9;
    const bool is_whole = value_.is_number_integer();
    if (!is_whole || value_.get<double>() < static_cast<double>(min) || value_.get<double>() > kMax)
      refuse(fmt::format("a whole number of at least {}", min));
    return value_.get<int64_t>();
  }

  double microseconds() const {
    if (!value_.is_number() || !(value_.get<double>() > 0)) refuse("microseconds above 0");
    return value_.get<double>();
  }

  bool flag() const {
    if (!value_.is_boolean()) refuse("true or false");
    return value_.get<bool>();
  }

private:
  const json& value_;
  const std::string& file_;
  std::string place_;
};

json parse(const std::string& file, const std::string& text) {
  if (text.empty()) throw UsageError(fmt::format("'{}' is empty; it must be a file of ep_bench --json", file));
  try {
    return json::parse(text);
  } catch (const json::parse_error& error) {
    // An error at the end is one behind the last byte.
    if (error.byte > text.size())
      throw UsageError(
          fmt::format("'{}' is cut short: its JSON is not complete at its end, after {} bytes", file, text.size()));
    throw UsageError(fmt::format("'{}' is not JSON: the error is at byte {} of {}", file, error.byte, text.size()));
  } catch (const json::exception&) { // a number beyond those of a double
    throw UsageError(fmt::format("'{}' is not JSON of ep_bench: it has a number that no double can hold", file));
  }
}

void check_schema(const Field& document, const std::string& file) {
  if (!document.has("schema"))
    throw UsageError(fmt::format("'{}' has no 'schema': it is {}", file,
                                 document.has("epx_version") && document.has("operations")
                                     ? "of an ep_bench from before there were versions of its files; measure again"
                                     : "no file of ep_bench --json"));
  const Field schema = document.at("schema");
  schema.at("name").one_of({"ep_bench"});
  const Field version = schema.at("version");
  if (version.value() != kSchemaVersion)
    version.refuse(fmt::format("{}, the version that this ep_bench reads", kSchemaVersion));
}

Machine read_machine(const Field& machine) {
  return {.host = machine.at("host").text(),
          .cpu = machine.at("cpu").text(),
          .cores = machine.at("cores").count(0),
          .gpu = machine.at("gpu").text_or_null(),
          .driver = machine.at("driver").text_or_null(),
          .nccl = machine.at("nccl").text_or_null()};
}

// A field that is null is as one that an older file lacks.
json read_config(const Field& config) {
  if (!config.value().is_object()) config.refuse("an object");
  for (const char* const field : {"tokens", "layout"}) // a row of the table begins with them
    config.at(field);
  json paired = config.value();
  for (const char* const field : kUnpairedFields)
    paired.erase(field);
  std::erase_if(paired.get_ref<json::object_t&>(), [](const auto& field) { return field.second.is_null(); });
  return paired;
}

StartMedian read_median(const Field& line) {
  const Field interval = line.at("interval_us");
  if (interval.size() != 2) interval.refuse("two numbers");
  const StartMedian median{.us = line.at("median_us").microseconds(),
                           .interval_us = {.lo = interval[0].microseconds(), .hi = interval[1].microseconds()},
                           .samples = line.at("samples").count(1)};
  if (!(median.interval_us.lo <= median.us && median.us <= median.interval_us.hi))
    interval.refuse(fmt::format("an interval that contains median_us, {}", median.us));
  return median;
}

// Returns the point of this config, which is new when no earlier start has it.
Point& point_of(ResultFile& result, const json& config) {
  const auto found = std::ranges::find(result.points, config, &Point::config);
  return found != result.points.end() ? *found
                                      : result.points.emplace_back(Point{.config = config, .failure = {}, .lines = {}});
}

void read_point(ResultFile& result, const Field& field, std::set<json>& configs) {
  const Field config = field.at("config");
  Point& point = point_of(result, read_config(config));
  if (!configs.insert(point.config).second) config.refuse("another config than that of each earlier point of the start");

  const std::string status = field.at("status").one_of({"complete", "failed", "not run"});
  if (status != "complete") {
    if (point.failure.empty())
      point.failure = status == "failed" ? "failed: " + field.at("error").text_or_null().value_or("no reason") : status;
    return;
  }
  const Field operations = field.at("operations");
  if (!operations.value().is_object()) operations.refuse("an object");
  for (const auto& [name, value] : operations.value().items()) {
    const Field line = operations.at(name.c_str());
    LineResult& of_line = point.lines[name];
    of_line.starts.push_back(read_median(line));
    of_line.num_unconverged += !line.at("converged").flag();
  }
}

} // namespace

ResultFile read_result_file(const std::string& name) {
  const json document = parse(name, read_text(name, fmt::format("'{}'", name)));
  const Field root(document, name, "");
  check_schema(root, name);

  ResultFile result;
  result.name = name;
  result.is_complete = root.at("status").one_of({"complete", "partial"}) == "complete";
  const Field run = root.at("run");
  result.library_version = run.at("library_version").text();
  result.num_ranks = run.at("ranks").count(1);
  result.ranks_per_node = run.at("ranks_per_node").count(0);
  result.transport = run.at("transport").one_of({"host", "nccl"}) == "nccl" ? EPX_TRANSPORT_NCCL : EPX_TRANSPORT_HOST;
  result.machine = read_machine(root.at("machine"));
  const Field starts = root.at("starts");
  result.num_starts = static_cast<int64_t>(starts.size());
  if (result.num_starts == 0) starts.refuse("an array of at least one start");
  for (size_t start = 0; start < starts.size(); ++start) {
    std::set<json> configs;
    const Field points = starts[start].at("points");
    for (size_t point = 0; point < points.size(); ++point)
      read_point(result, points[point], configs);
  }
  return result;
}

} // namespace epx::bench
