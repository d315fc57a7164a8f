// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/document.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "epx/epx.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/workload/text_file.h"

namespace epx::bench {
namespace {

constexpr const char *kComplete = "complete", *kPartial = "partial";

nlohmann::json or_null(const std::optional<std::string>& text) {
  return text ? nlohmann::json(*text) : nlohmann::json(nullptr);
}

nlohmann::json machine_json(const MachineFacts& machine) {
  return {{"host", machine.host},
          {"cpu", machine.cpu},
          {"cores", machine.cores},
          {"gpu", or_null(machine.gpu)},
          {"driver", or_null(machine.driver)},
          {"nccl", or_null(machine.nccl)}};
}

nlohmann::json point_json(const PointResult& point) {
  nlohmann::json json = point.results ? to_json(*point.results) : nlohmann::json{{"config", config_json(point.options)}};
  json["status"] = to_string(point.status);
  json["error"] = point.error.empty() ? nlohmann::json(nullptr) : nlohmann::json(point.error);
  return json;
}

[[noreturn]] void refuse_to_append(const std::string& file, const std::string& reason) {
  throw UsageError(fmt::format("cannot add to '{}' of --json: {}", file, reason));
}

// Returns null for a file that is empty.
nlohmann::json read_document(const std::string& file) {
  std::error_code error;
  const uintmax_t bytes = std::filesystem::file_size(file, error);
  if (error || bytes > static_cast<uintmax_t>(kMaxTextBytes))
    refuse_to_append(file, error ? error.message() : fmt::format("it has {} bytes, more than {}", bytes, kMaxTextBytes));
  std::ifstream stream(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  if (text.empty()) return nullptr;
  nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded()) refuse_to_append(file, "it is not JSON");
  const nlohmann::json schema{{"name", "ep_bench"}, {"version", kSchemaVersion}};
  if (!json.is_object() || !json.contains("schema") || json["schema"] != schema)
    refuse_to_append(file, fmt::format("it is no file of ep_bench with version {} of its schema", kSchemaVersion));
  return json;
}

void check_fits(const nlohmann::json& earlier, const Sweep& sweep, const RunFacts& facts) {
  const std::string& file = sweep.common().json_file;
  const auto compare = [&](const char* what, const nlohmann::json& of_file, const nlohmann::json& of_run) {
    if (of_file != of_run)
      refuse_to_append(file, fmt::format("its {} is {} and that of this run is {}", what, of_file.dump(), of_run.dump()));
  };
  try {
    compare("number of ranks", earlier.at("run").at("ranks"), facts.num_ranks);
    compare("EPX_TUNING", earlier.at("run").value("tuning", ""), facts.tuning);
    const nlohmann::json machine = machine_json(facts.machine);
    for (const char* field : {"cpu", "gpu"})
      compare(field, earlier.at("machine").at(field), machine[field]);
    const nlohmann::json& points = earlier.at("starts").at(0).at("points");
    compare("number of points", points.size(), sweep.points.size());
    for (size_t i = 0; i < sweep.points.size(); ++i) {
      const nlohmann::json config = config_json(sweep.points[i]);
      for (const auto& [field, value] : config.items())
        compare(fmt::format("{} of point {}", field, i).c_str(), points[i].at("config").at(field), value);
    }
  } catch (const nlohmann::json::exception& error) {
    refuse_to_append(file, fmt::format("it lacks what every file of ep_bench has ({})", error.what()));
  }
}

} // namespace

std::string tuning_of_environment() {
  const char* text = std::getenv("EPX_TUNING");
  return text == nullptr ? "" : text;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 32> text{};
  gmtime_r(&now, &parts);
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

nlohmann::json start_json(int number, std::span<const PointResult> points) {
  nlohmann::json json{{"start", number}, {"points", nlohmann::json::array()}};
  for (const PointResult& point : points)
    json["points"].push_back(point_json(point));
  const bool is_complete =
      std::ranges::all_of(points, [](const PointResult& point) { return point.status == PointStatus::Complete; });
  json["status"] = is_complete ? kComplete : kPartial;
  return json;
}

Document::Document(const Sweep& sweep, RunFacts facts) : facts_(std::move(facts)) {
  const std::string& file = sweep.common().json_file;
  file_.emplace(file);
  if (!sweep.common().appends) return;
  if (file_->is_pipe()) refuse_to_append(file, "it is no regular file");
  earlier_ = read_document(file);
  if (!earlier_.is_null()) check_fits(earlier_, sweep, facts_);
}

nlohmann::json Document::to_json(std::span<const PointResult> points) const {
  nlohmann::json json = earlier_;
  if (json.is_null()) {
    const auto measured = std::ranges::find(points, PointStatus::Complete, &PointResult::status);
    const Options& options = points.front().options;
    json = {
        {"schema", {{"name", "ep_bench"}, {"version", kSchemaVersion}}},
        {"run",
         {{"command", facts_.command},
          {"tuning", facts_.tuning},
          {"began", facts_.began},
          {"library_version", version_string(epx_version())},
          {"ranks", facts_.num_ranks},
          {"ranks_per_node", measured == points.end() ? options.ranks_per_node : measured->results->group.ranks_per_node},
          {"transport", to_string(options.transport)}}},
        {"machine", machine_json(facts_.machine)},
        {"starts", nlohmann::json::array()}};
  }
  nlohmann::json& starts = json["starts"];
  starts.push_back(start_json(static_cast<int>(starts.size()), points));
  const bool is_complete =
      std::ranges::all_of(starts, [](const nlohmann::json& start) { return start.at("status") == kComplete; });
  json["status"] = is_complete ? kComplete : kPartial;
  return json;
}

void Document::write(std::span<const PointResult> points, bool is_last) {
  const bool has_complete =
      std::ranges::any_of(points, [](const PointResult& point) { return point.status == PointStatus::Complete; });
  if (!has_complete || (file_->is_pipe() && !is_last)) return;
  file_->write(to_json(points));
}

} // namespace epx::bench
