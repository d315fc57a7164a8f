// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/report.h"

#include <algorithm>
#include <iterator>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/ep_bench/block/report.h"
#include "tools/ep_bench/row_format.h"

namespace epx::bench {
namespace {

constexpr std::array kEventNames{"bad_index", "overflow", "too_few_rows", "handle_mismatch"};

// A kind of event that only a newer library has is printed as its number.
std::string event_name(size_t kind) {
  return kind < kEventNames.size() ? kEventNames[kind] : fmt::format("{}", kind);
}

// Returns "-" where there is no figure.
template <typename T>
std::string cell(const std::optional<T>& value, const char* format) {
  return value ? fmt::format(fmt::runtime(format), *value) : "-";
}

std::optional<double> copy_ratio(const OperationFigures& figures) {
  return figures.copy ? std::optional(figures.copy->ratio) : std::nullopt;
}

std::optional<double> floor_us(const OperationFigures& figures) {
  return figures.floor ? std::optional(figures.floor->us()) : std::nullopt;
}

std::optional<int64_t> wrong_of(const Results& results, size_t line) {
  return results.wrong && line < results.wrong->size() ? std::optional((*results.wrong)[line]) : std::nullopt;
}

template <typename T>
nlohmann::json json_or_null(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

bool is_on_gpus(const Results& results) {
  return results.group.transport == EPX_TRANSPORT_NCCL;
}

int num_nodes(const Results& results) {
  return results.group.num_ranks / results.group.ranks_per_node;
}

// Returns the figures of dispatch's memcpy, if there are any.
std::optional<CopyFigures> dispatch_copy(const Results& results) {
  const std::span<const Line> lines = lines_of(results.options);
  return results.figures[std::ranges::find(lines, EPX_OP_DISPATCH, &Line::operation) - lines.begin()].copy;
}

int64_t samples_of(const Results& results) {
  return results.figures.front().samples;
}

const char* receive_memory(const Options& options) {
  return options.staged ? "plain (staged)" : "window";
}

nlohmann::json range_json(const std::optional<Range>& range) {
  return range ? nlohmann::json{range->min, range->median, range->max} : nlohmann::json(nullptr);
}

nlohmann::json environment_json(const Environment& environment) {
  return {{"sm_clock_mhz", range_json(environment.sm_clock_mhz)},
          {"power_w", range_json(environment.power_w)},
          {"temperature_c", range_json(environment.temperature_c)},
          {"throttled_samples", json_or_null(environment.throttled_samples)}};
}

nlohmann::json operation_json(const OperationFigures& figures, std::optional<int64_t> wrong) {
  nlohmann::json json{{"median_us", figures.median_us},
                      {"p99_us", figures.p99_us},
                      {"min_us", figures.min_us},
                      {"interval_us", {figures.interval_us.lo, figures.interval_us.hi}},
                      {"samples", figures.samples},
                      {"outliers", figures.outliers},
                      {"throttled", json_or_null(figures.throttled)},
                      {"converged", figures.converged},
                      {"slowest_rank", figures.slowest_rank},
                      {"start_skew_us", json_or_null(figures.start_skew_us)},
                      {"logical_rows", figures.logical_rows},
                      {"wire_rows", figures.wire_rows},
                      {"written_rows", figures.written_rows},
                      {"row_bytes", nullptr},
                      {"logical_gbps", json_or_null(figures.logical_gbps)},
                      {"wire_gbps", json_or_null(figures.wire_gbps)},
                      {"memcpy_ratio", json_or_null(copy_ratio(figures))},
                      {"memcpy_us", nullptr},
                      {"memcpy_total_gbps", nullptr},
                      {"floor", nullptr},
                      {"ratio", json_or_null(figures.floor_ratio)},
                      {"ratio_on_comm_sms", json_or_null(figures.floor_ratio_on_sms)},
                      {"rail", nullptr},
                      {"wrong", json_or_null(wrong)}};
  if (figures.row_bytes)
    json["row_bytes"] = {
        {"input", figures.row_bytes->input}, {"wire", figures.row_bytes->wire}, {"received", figures.row_bytes->received}};
  if (figures.rail) json["rail"] = {{"sent_bytes", figures.rail->sent}, {"needed_bytes", figures.rail->needed}};
  if (figures.copy) {
    json["memcpy_us"] = figures.copy->median_us;
    json["memcpy_total_gbps"] = figures.copy->gbps;
  }
  if (figures.floor)
    json["floor"] = {{"us", figures.floor->us()},
                     {"wire_us", figures.floor->wire_us},
                     {"wire_variant", figures.floor->wire_variant},
                     {"wire_us_of_variants", figures.floor->wire_us_of_variants},
                     {"hbm_us", figures.floor->hbm_us},
                     {"hbm_variant", figures.floor->hbm_variant},
                     {"wire_us_on_comm_sms", figures.floor->wire_us_on_sms},
                     {"hbm_us_on_comm_sms", figures.floor->hbm_us_on_sms}};
  return json;
}

// Names what drops routes.
const char* dropper(const Options& options) {
  if (options.is_rank_major()) return "M";
  if (options.zone_stride > 0)
    return options.fixed_rail_tokens == 0 ? "zone stride" : "zone stride and the fixed number of rail tokens";
  if (options.fixed_rail_tokens == 0) return "capacity";
  return options.capacity == 0 ? "the fixed number of rail tokens" : "capacity and the fixed number of rail tokens";
}

std::string layout_text(const Options& options) {
  if (options.is_rank_major())
    return fmt::format("{} with M = {} rows", to_string(options.layout), options.rows_per_source());
  const std::string stride = options.zone_stride > 0 ? fmt::format(", zones {} rows apart", options.zone_stride) : "";
  return fmt::format("alignment {}{}", options.alignment, stride);
}

// Says how the rows of dispatch and partial sums travel, unless they do as they are.
std::string format_lines(const Options& options) {
  std::string text;
  if (options.format() != NamedFormat::None) {
    const RowBytes bytes = row_bytes_of(options, EPX_OP_DISPATCH);
    text = fmt::format("rows of dispatch in {}; a row has {} bytes in the input, {} on the wire, {} where it is received\n",
                       row_format_text(options), bytes.input, bytes.wire, bytes.received);
  }
  if (options.sum_format != NamedFormat::None)
    text += fmt::format("partial sums of combine and dispatch_bwd in {}; a sum has {} bytes on the wire\n",
                        to_string(options.sum_format), row_bytes_of(options, EPX_OP_COMBINE).wire);
  return text;
}

std::string header(const Results& results) {
  const Options& options = results.options;
  return fmt::format("ep_bench {}: {} ranks, {} node{} x {} ranks, transport {}, {} tokens per rank x {} {}, top-{} of {} "
                     "experts, routing {}\n"
                     "{}, combine {}, receive capacity R = {} rows, receive tensors in {} memory, seed {}, "
                     "{} iterations\n"
                     "handle memory {} bytes of {} allowed, window {} bytes per rank, group created in {:.1f} ms\n",
                     version_string(results.library_version), results.group.num_ranks, num_nodes(results),
                     num_nodes(results) == 1 ? "" : "s", results.group.ranks_per_node, to_string(results.group.transport),
                     options.tokens, options.hidden, to_string(options.dtype), options.top_k, options.experts,
                     to_string(options.routing), layout_text(options), to_string(options.combine_precision),
                     results.group.max_recv_tokens_per_rank, receive_memory(options), options.seed, samples_of(results),
                     results.handle_mem_bytes, results.handle_mem_limit, results.group.window_bytes,
                     results.group_creation_ms);
}

// Lists what travels between nodes; empty for a group of one.
std::string rails_text(const Results& results) {
  std::string text;
  for (size_t line = 0; line < results.figures.size(); ++line)
    if (const auto& rail = results.figures[line].rail)
      text += fmt::format("  {:<20}{:.0f} bytes sent, {:.0f} needed{}\n", lines_of(results.options)[line].name, rail->sent,
                          rail->needed, rail->needed > 0 ? fmt::format(": {:.3f}", rail->sent / rail->needed) : "");
  if (text.empty()) return text;
  const Options& options = results.options;
  const int64_t fixed = options.fixed_rail_tokens > 0 ? options.fixed_rail_tokens
                        : options.graph               ? std::max(options.tokens, 1)
                                                      : 0;
  return fmt::format("rails, of a rank in a call, {}:\n{}",
                     fixed > 0 ? fmt::format("sizes fixed at {} tokens to each other node", fixed) : "sizes exact", text);
}

std::string rail_floor_text(const Results& results) {
  std::string text = "floor (speed-of-light bound), NCCL alone with the distinct rows that must cross between nodes:\n";
  for (size_t line = 0; line < results.figures.size(); ++line)
    if (const auto& floor = results.figures[line].floor)
      text += fmt::format("  {:<20}rails {:.1f} us ({})\n", lines_of(results.options)[line].name, floor->wire_us,
                          floor->wire_variant);
  return text;
}

// Says how the calls of nccl were made, and what the speed-of-light bounds consist of.
std::string gpu_header(const Results& results) {
  const Options& options = results.options;
  std::string text = fmt::format(
      "calls {}, SMs for communication: {} ({})\n", options.graph ? "replayed from CUDA graphs" : "made one by one",
      results.group.num_comm_sms, options.num_comm_sms == 0 ? "the library's default" : "--num-comm-sms");
  text += rails_text(results);
  if (!options.floor) return text;
  if (num_nodes(results) > 1) return text + rail_floor_text(results);
  text += "floor (speed-of-light bound), the larger of (rows stored once to each rank that they must reach, rows read and "
          "written locally):\n";
  for (size_t line = 0; line < results.figures.size(); ++line)
    if (const auto& floor = results.figures[line].floor) {
      text += fmt::format("  {:<20}wire {:.1f} us ({}), HBM {:.1f} us ({})", lines_of(options)[line].name, floor->wire_us,
                          floor->wire_variant, floor->hbm_us, floor->hbm_variant);
      if (const auto& ratio = results.figures[line].floor_ratio_on_sms)
        text += fmt::format("; on {} SMs {:.1f} and {:.1f} us: ratio {:.3f}", options.num_comm_sms, floor->wire_us_on_sms,
                            floor->hbm_us_on_sms, *ratio);
      text += "\n";
    }
  return text;
}

// One line of a table whose first column is `names` wide; the last columns but one differ by transport.
std::string table_line(const Results& results, size_t line, size_t names) {
  const OperationFigures& figures = results.figures[line];
  std::string text = fmt::format("{:<{}}{:>11.1f}{:>11.1f}{:>11.1f}{:>9}{:>14}{:>11}", lines_of(results.options)[line].name,
                                 names, figures.median_us, figures.p99_us, figures.min_us, figures.slowest_rank,
                                 cell(figures.logical_gbps, "{:.3f}"), cell(figures.wire_gbps, "{:.3f}"));
  if (is_on_gpus(results))
    text += fmt::format("{:>11}{:>8}", cell(floor_us(figures), "{:.1f}"), cell(figures.floor_ratio, "{:.3f}"));
  else
    text += fmt::format("{:>14}", cell(copy_ratio(figures), "{:.2f}"));
  return text + fmt::format("{:>8}\n", cell(wrong_of(results, line), "{}"));
}

std::string table_header(const Results& results, size_t names) {
  return fmt::format("\n{:<{}}{:>11}{:>11}{:>11}{:>9}{:>14}{:>11}{}{:>8}\n", "operation", names, "median us", "p99 us",
                     "min us", "slowest", "logical GB/s", "wire GB/s",
                     is_on_gpus(results) ? fmt::format("{:>11}{:>8}", "floor us", "ratio")
                                         : fmt::format("{:>14}", "memcpy ratio"),
                     "wrong");
}

std::string native_table(const NativeFigures& native) {
  std::string text = fmt::format("\nnative way: counts to the host, one row per route by ncclSend and ncclRecv, local "
                                 "permutation; a rank sends {:.0f} bytes of rows in a call, {:.0f} of them to other nodes\n"
                                 "{:<25}{:>11}{:>11}{:>11}{:>9}  {:<18}{:>11}{:>12}{:>8}\n",
                                 native.sent_bytes, native.sent_to_nodes_bytes, "native", "median us", "p99 us", "min us",
                                 "slowest", "epx", "median us", "native/epx", "wrong");
  for (const NativeCallFigures& call : native.calls)
    for (const NativeRatio& ratio : call.ratios)
      text += fmt::format("{:<25}{:>11.1f}{:>11.1f}{:>11.1f}{:>9}  {:<18}{:>11.1f}{:>12.3f}{:>8}\n", call.name,
                          call.median_us, call.p99_us, call.min_us, call.slowest_rank, ratio.line, ratio.line_us,
                          ratio.ratio, cell(call.wrong, "{}"));
  return text;
}

nlohmann::json native_json(const NativeFigures& native) {
  nlohmann::json calls;
  for (const NativeCallFigures& call : native.calls) {
    nlohmann::json& json = calls[call.name] = {{"median_us", call.median_us},
                                               {"p99_us", call.p99_us},
                                               {"min_us", call.min_us},
                                               {"slowest_rank", call.slowest_rank},
                                               {"wrong", json_or_null(call.wrong)}};
    for (const NativeRatio& ratio : call.ratios)
      json["ratio_to"][ratio.line] = ratio.ratio;
  }
  return {{"sent_bytes", native.sent_bytes}, {"sent_to_nodes_bytes", native.sent_to_nodes_bytes}, {"calls", calls}};
}

} // namespace

std::string version_string(int32_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

int64_t handle_memory_limit(const Options& options, const epx_group_info& group) {
  const int64_t max_tokens = std::max(options.tokens, 1);
  const int64_t num_ranks = group.num_ranks, num_nodes = num_ranks / group.ranks_per_node;
  if (num_nodes > 1 && group.transport == EPX_TRANSPORT_NCCL) {
    constexpr int64_t kChunk = 1024;
    const int64_t tokens = max_tokens <= kChunk ? max_tokens : (max_tokens + kChunk - 1) / kChunk * kChunk;
    return 12 * (num_nodes + 1) * tokens * options.top_k + (4 * num_ranks + 16 * num_nodes) * tokens +
           12 * group.max_recv_tokens_per_rank + 8 * num_ranks * options.experts + int64_t{64} * 1024;
  }
  return 16 * (max_tokens * options.top_k + group.max_recv_tokens_per_rank) + 8 * num_ranks * options.experts +
         int64_t{64} * 1024;
}

bool passed(const Results& results) {
  if (results.wrong && std::ranges::any_of(*results.wrong, [](int64_t wrong) { return wrong != 0; })) return false;
  if (results.native &&
      std::ranges::any_of(results.native->calls, [](const NativeCallFigures& call) { return call.wrong.value_or(0) != 0; }))
    return false;
  if (results.block && !results.block->passed()) return false;
  for (int kind = 0; kind < EPX_MAX_EVENT_KINDS; ++kind) {
    const bool asked_for =
        (kind == EPX_EVENT_OVERFLOW && (results.options.capacity > 0 || results.options.zone_stride > 0)) ||
        (kind == EPX_EVENT_TOO_FEW_ROWS && results.options.max_rows > 0);
    if (results.events[kind] != 0 && !asked_for) return false;
  }
  return true;
}

std::string to_table(const Results& results) {
  std::string text = header(results) + format_lines(results.options);
  const auto out = std::back_inserter(text);
  if (const auto copy = dispatch_copy(results))
    fmt::format_to(out, "memcpy of dispatch's rows: {:.2f} GB/s per rank, {:.2f} GB/s all ranks together\n",
                   copy->gbps / results.group.num_ranks, copy->gbps);
  if (results.dropped_routes > 0)
    fmt::format_to(out, "dropped by {}: {:.1f} routes per iteration of all ranks\n", dropper(results.options),
                   results.dropped_routes);

  if (is_on_gpus(results)) text += gpu_header(results);

  const size_t names = is_on_gpus(results) ? 25 : 13;
  text += table_header(results, names);
  for (size_t line = 0; line < results.figures.size(); ++line)
    text += table_line(results, line, names);
  if (results.native) text += native_table(*results.native);
  if (results.block) text += block_table(*results.block, results.options);
  for (size_t kind = 0; kind < results.events.size(); ++kind)
    if (results.events[kind] != 0)
      fmt::format_to(out, "event {}: {} over the whole run, all ranks\n", event_name(kind), results.events[kind]);
  return text;
}

nlohmann::json config_json(const Options& options) {
  const auto given = [](bool is_given, auto value) { return is_given ? nlohmann::json(value) : nlohmann::json(nullptr); };
  const NoiseTarget target = options.noise.value_or(NoiseTarget{});
  return {{"tokens", options.tokens},
          {"hidden", options.hidden},
          {"experts", options.experts},
          {"top_k", options.top_k},
          {"dtype", to_string(options.dtype)},
          {"row_format", given(options.row_format != NamedFormat::None, to_string(options.row_format))},
          {"quantised_input", given(options.row_format != NamedFormat::None, options.has_quantised_input)},
          {"scale_layout", given(options.row_format != NamedFormat::None, to_string(options.scale_layout))},
          {"wire_format", given(options.wire_format != NamedFormat::None, to_string(options.wire_format))},
          {"sum_format", given(options.sum_format != NamedFormat::None, to_string(options.sum_format))},
          {"routing", to_string(options.routing)},
          {"layout", to_string(options.layout)},
          {"max_rows", given(options.is_rank_major(), options.rows_per_source())},
          {"alignment", options.alignment},
          {"zone_stride", given(options.zone_stride > 0, options.zone_stride)},
          {"pads", to_string(options.pads)},
          {"capacity", options.capacity},
          {"seed", options.seed},
          {"transport", to_string(options.transport)},
          {"combine_precision", to_string(options.combine_precision)},
          {"staged", options.staged},
          {"graph", options.graph},
          {"num_comm_sms", options.num_comm_sms},
          {"ranks_per_node", options.ranks_per_node},
          {"fixed_rail_tokens", options.fixed_rail_tokens},
          {"iters", given(!options.noise, options.iterations)},
          {"warmup", given(!options.warms_up_until_stable, options.warmup)},
          {"noise_percent", given(options.noise.has_value(), target.percent)},
          {"budget_s", given(options.noise.has_value(), target.budget_s)},
          {"input_sets", options.num_input_sets()},
          {"verify", options.verify},
          {"floor", options.floor},
          {"native", options.native},
          {"block", options.block.is_measured}};
}

nlohmann::json to_json(const Results& results) {
  nlohmann::json operations, events;
  for (size_t line = 0; line < results.figures.size(); ++line)
    operations[lines_of(results.options)[line].name] = operation_json(results.figures[line], wrong_of(results, line));
  for (size_t kind = 0; kind < results.events.size(); ++kind)
    if (kind < kEventNames.size() || results.events[kind] != 0) events[event_name(kind)] = results.events[kind];
  const auto copy = dispatch_copy(results);
  return {{"config", config_json(results.options)},
          {"group",
           {{"nodes", num_nodes(results)},
            {"ranks_per_node", results.group.ranks_per_node},
            {"num_comm_sms", results.group.num_comm_sms},
            {"timeout_ms", results.group.timeout_ms},
            {"creation_ms", results.group_creation_ms},
            {"handle_mem_bytes", results.handle_mem_bytes},
            {"handle_mem_limit_bytes", results.handle_mem_limit},
            {"window_bytes", results.group.window_bytes},
            {"max_recv_tokens_per_rank", results.group.max_recv_tokens_per_rank}}},
          {"environment", environment_json(results.environment)},
          {"memcpy_total_gbps", copy ? nlohmann::json(copy->gbps) : nlohmann::json(nullptr)},
          {"memcpy_gbps_per_rank", copy ? nlohmann::json(copy->gbps / results.group.num_ranks) : nlohmann::json(nullptr)},
          {"dropped_routes", results.dropped_routes},
          {"operations", operations},
          {"native", results.native ? native_json(*results.native) : nlohmann::json(nullptr)},
          {"block", results.block ? block_json(*results.block, results.options) : nlohmann::json(nullptr)},
          {"events", events},
          {"passed", passed(results)}};
}

} // namespace epx::bench
