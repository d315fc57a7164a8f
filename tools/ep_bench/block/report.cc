// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/report.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace epx::bench {
namespace {

std::string cell(const std::optional<double>& value, int decimals) {
  return value ? fmt::format("{:.{}f}", *value, decimals) : "-";
}

nlohmann::json json_or_null(const std::optional<double>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

nlohmann::json json_of(const Quartiles& quartiles) {
  return {quartiles.low_us, quartiles.high_us};
}

nlohmann::json json_or_null(const std::optional<Quartiles>& value) {
  return value ? json_of(*value) : nlohmann::json(nullptr);
}

std::string gather_text(const BlockResults& results, const Options& options) {
  std::string text;
  for (const GatherFigures& gather : results.gathers) {
    text += fmt::format("{}: weights of {} experts, {} bytes from other ranks", gather.line, results.gathered_experts,
                        gather.received_bytes);
    if (options.transport == EPX_TRANSPORT_NCCL)
      text += options.block.gather_sms > 0 ? fmt::format(" by {} SMs", options.block.gather_sms) : " by copy engines";
    for (const auto& [line, percent] : gather.added_percent)
      text += fmt::format("; beside {} it adds {:.1f} %", line, percent);
    if (gather.wrong) text += fmt::format("; {} elements are wrong{}", *gather.wrong, *gather.wrong == 0 ? "" : ": WRONG");
    text += "\n";
  }
  if (const auto ratio = results.fp8_to_wide()) text += fmt::format("gather-fp8 / gather: {:.3f} of the time\n", *ratio);
  return text;
}

nlohmann::json gather_json(const BlockResults& results, const Options& options) {
  if (results.gathers.empty()) return nullptr;
  nlohmann::json forms;
  for (const GatherFigures& gather : results.gathers)
    forms[to_string(gather.form)] = {{"line", gather.line},
                                     {"received_bytes", gather.received_bytes},
                                     {"added_percent", std::map(gather.added_percent.begin(), gather.added_percent.end())},
                                     {"wrong", gather.wrong ? nlohmann::json(*gather.wrong) : nlohmann::json(nullptr)}};
  return {{"experts", results.gathered_experts},
          {"sms", options.block.gather_sms},
          {"forms", forms},
          {"fp8_to_wide", json_or_null(results.fp8_to_wide())}};
}

} // namespace

bool BlockResults::passed() const {
  return std::ranges::all_of(differences, &BlockDifference::passed) &&
         std::ranges::all_of(gathers, [](const GatherFigures& gather) { return gather.wrong.value_or(0) == 0; });
}

std::optional<double> BlockResults::fp8_to_wide() const {
  const auto wide = std::ranges::find(gathers, GatherForm::Wide, &GatherFigures::form);
  const auto fp8 = std::ranges::find(gathers, GatherForm::Fp8, &GatherFigures::form);
  if (wide == gathers.end() || fp8 == gathers.end()) return std::nullopt;
  return fp8->median_us / wide->median_us;
}

std::optional<double> BlockFigures::ratio() const {
  if (!dense_us || !wire_us) return std::nullopt;
  return median_us / (*dense_us + *wire_us);
}

std::optional<double> BlockFigures::max_ratio() const {
  if (!dense_us || !wire_us) return std::nullopt;
  return median_us / std::max(*dense_us, *wire_us);
}

std::string block_table(const BlockResults& results, const Options& options) {
  size_t names = 25;
  for (const BlockFigures& line : results.lines)
    names = std::max(names, line.name.size() + 1);
  std::string text =
      fmt::format("\nblock: {} experts of {} x {}{}, SwiGLU, {}\n{:<{}}{:>11}{:>9}{:>11}{:>11}{:>9}{:>11}"
                  "{:>10}{:>11}{:>11}{:>8}{:>11}\n",
                  options.experts, options.hidden, options.block.ffn, options.block.has_biases ? " with biases" : "",
                  to_string(options.dtype), "line", names, "median us", "iqr us", "p99 us", "min us", "slowest",
                  "paused us", "TFLOP/s", "dense us", "wire us", "ratio", "max ratio");
  for (const BlockFigures& line : results.lines)
    text += fmt::format("{:<{}}{:>11.1f}{:>9.1f}{:>11.1f}{:>11.1f}{:>9}{:>11}{:>10}{:>11}{:>11}{:>8}{:>11}\n", line.name,
                        names, line.median_us, line.quartiles.high_us - line.quartiles.low_us, line.p99_us, line.min_us,
                        line.slowest_rank, cell(line.paused_us, 1), cell(line.tflops, 1), cell(line.dense_us, 1),
                        cell(line.wire_us, 1), cell(line.ratio(), 3), cell(line.max_ratio(), 3));
  text += gather_text(results, options);
  for (const BlockDifference& difference : results.differences)
    text += fmt::format("{} - block, {}: at most {:.3g}, {:.3g} of the largest element; {:.3g} is allowed{}\n",
                        difference.layer, difference.tensor, difference.largest, difference.largest / difference.scale,
                        difference.limit, difference.passed() ? "" : ": WRONG");
  return text;
}

nlohmann::json block_json(const BlockResults& results, const Options& options) {
  nlohmann::json lines = nlohmann::json::object(), differences = nlohmann::json::object();
  for (const BlockFigures& line : results.lines)
    lines[line.name] = {{"median_us", line.median_us},
                        {"p99_us", line.p99_us},
                        {"min_us", line.min_us},
                        {"quartiles_us", json_of(line.quartiles)},
                        {"rounds_us", line.rounds_us},
                        {"slowest_rank", line.slowest_rank},
                        {"paused_us", json_or_null(line.paused_us)},
                        {"paused_quartiles_us", json_or_null(line.paused_quartiles)},
                        {"tflops", json_or_null(line.tflops)},
                        {"dense_us", json_or_null(line.dense_us)},
                        {"paused_dense_us", json_or_null(line.paused_dense_us)},
                        {"wire_us", json_or_null(line.wire_us)},
                        {"ratio", json_or_null(line.ratio())},
                        {"max_ratio", json_or_null(line.max_ratio())}};
  for (const BlockDifference& difference : results.differences)
    differences[difference.layer][difference.tensor] = {{"largest", difference.largest},
                                                        {"scale", difference.scale},
                                                        {"limit", difference.limit},
                                                        {"passed", difference.passed()}};
  return {{"ffn", options.block.ffn},
          {"biases", options.block.has_biases},
          {"recipe", to_string(options.block.recipe)},
          {"path", to_string(options.block.path)},
          {"pause_ms", options.block.pause_ms},
          {"rounds", options.block.rounds},
          {"libraries", results.libraries},
          {"lines", lines},
          {"differences", differences},
          {"gather", gather_json(results, options)}};
}

} // namespace epx::bench
