// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/point.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#if defined(EPX_BENCH_HAS_MOE)
#include "tools/ep_bench/block/bench.h"
#endif
#include "tools/ep_bench/block/weight_gather.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/measure.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/memory_need.h"
#include "tools/ep_bench/native/native_figures.h"
#include "tools/ep_bench/row_format.h"
#include "tools/ep_bench/sampler.h"
#include "tools/ep_bench/workload/traffic.h"
#include "tools/ep_bench/workload/verify.h"
#include "tools/ep_bench/workload/workload.h"
#if defined(EPX_WITH_CUDA)
#include "tools/ep_bench/floor/floor.h"
#include "tools/ep_bench/floor/rail_floor.h"
#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/measure_gpu.h"
#include "tools/ep_bench/gpu/stream_blocker.h"
#include "tools/ep_bench/native/native.h"
#endif

namespace epx::bench {
namespace {

// The receive tensors have so many rows beyond those in use, which no call may touch.
constexpr int64_t kSpareRows = 8;

std::array<uint64_t, EPX_MAX_EVENT_KINDS> gather_events(MeasuredGroup& measured, const Peers& peers) {
  peers.together([&] { measured.finish(); });
  std::array<uint64_t, EPX_MAX_EVENT_KINDS> events{};
  for (const auto& of_rank : peers.gather(measured.events()))
    for (int kind = 0; kind < EPX_MAX_EVENT_KINDS; ++kind)
      events[kind] += of_rank[kind];
  return events;
}

std::string nodes_text(const epx_group_info& group) {
  return fmt::format("the group has {} nodes of {} ranks", group.num_ranks / group.ranks_per_node, group.ranks_per_node);
}

void check_nodes(const Options& options, const epx_group_info& group) {
  if (options.is_rank_major() && group.ranks_per_node < group.num_ranks)
    throw AgreedError(kExitUsage, fmt::format("--layout is '{}' and {}; rank-major rows do not travel between nodes",
                                              to_string(options.layout), nodes_text(group)));
  if (options.transport == EPX_TRANSPORT_NCCL && group.ranks_per_node < group.num_ranks)
    for (const auto& [option, format] : named_formats(options))
      if (format != NamedFormat::None)
        throw AgreedError(kExitUsage, fmt::format("{} is '{}' and {}; rows travel between nodes as they are", option,
                                                  to_string(format), nodes_text(group)));
}

void check_gather_fits(const Options& options, const epx_group_info& group, [[maybe_unused]] const Memory& memory) {
  require_gather(options, group.num_ranks);
  if (options.block.gathers.empty() || options.transport != EPX_TRANSPORT_NCCL) return;
  if (options.block.gather_sms == 0) return require_equal_parts(options, group.num_ranks);
  if (group.ranks_per_node < group.num_ranks)
    throw UsageError(
        fmt::format("--gather is given and {}; epx_ragged_all_to_all is a call of one node", nodes_text(group)));
#if defined(EPX_WITH_CUDA)
  const int num_sms = dynamic_cast<const Gpu&>(memory).num_sms();
  if (int64_t{group.num_comm_sms} + options.block.gather_sms > num_sms)
    throw UsageError(
        fmt::format("--gather-sms is {} and the block's calls take {} SMs (--num-comm-sms) of the GPU's {}; both "
                    "must fit onto it at the same time",
                    options.block.gather_sms, group.num_comm_sms, num_sms));
#endif
}

// The speed-of-light bound and the native way are measured for the whole routing, so no route may be dropped; and the serial
// reference drops none for the sake of --fixed-rail-tokens.
void check_drops(const Options& options, const Survey& survey, const epx_group_info& group) {
  const double dropped = dropped_routes(survey, options.top_k);
  if (dropped == 0) return;
  const bool is_whole = options.floor || options.native;
  const char* const option = options.floor ? "--floor" : options.native ? "--native" : "--verify";
  const char* const what = options.floor    ? "the speed-of-light bound"
                           : options.native ? "the native way"
                                            : "the serial reference";
  if (options.fixed_rail_tokens > 0 && group.ranks_per_node < group.num_ranks && (is_whole || options.verify))
    throw AgreedError(
        kExitUsage,
        fmt::format("{} is given, --fixed-rail-tokens is {} and {}, and {:.1f} routes per iteration are dropped; "
                    "{} is for routing whose tokens all find a place on the rails",
                    option, options.fixed_rail_tokens, nodes_text(group), dropped, what));
  const auto [bound, rows] = options.is_rank_major()   ? std::pair<const char*, int64_t>("--max-rows", options.max_rows)
                             : options.zone_stride > 0 ? std::pair("--zone-stride", options.zone_stride)
                                                       : std::pair("--capacity", options.capacity);
  if (is_whole)
    throw AgreedError(kExitUsage, fmt::format("{} is given and {} is {}, which drops {:.1f} routes per iteration; "
                                              "{} is for routing without drops",
                                              option, bound, rows, dropped, what));
}

#if defined(EPX_WITH_CUDA)
struct GpuFigures {
  Figures figures;
  std::optional<NativeFigures> native;
  Environment environment;
};

GpuFigures bench_on_gpu(MeasuredGroup& measured, std::span<const InputSet> sets, const Survey& survey,
                        const Workload& workload, const Options& options, const Peers& peers, Gpu& gpu) {
  StreamBlocker blocker(gpu, peers, measured.info().timeout_ms);
  Sampler sampler(options, lines_of(options).size(), peers);
  const GpuMeasurements measurements = measure_on_gpu(measured, sets, options, peers, gpu, blocker, sampler);
  Floors floors;
  if (options.floor) {
    const std::vector<int32_t> first_experts = peers.gather(measured.info().first_local_expert);
    std::vector<RoutingOfAll> routing;
    for (int set = 0; set < std::ssize(sets); ++set) {
      routing.push_back({{},
                         first_experts,
                         options.experts,
                         options.top_k,
                         options.alignment,
                         options.pads == EPX_PADS_ZERO,
                         options.layout});
      for (int rank = 0; rank < peers.num_ranks(); ++rank)
        routing.back().topk_idx.push_back(workload.topk_idx(set, rank));
    }
    const epx_group_info& group = measured.info();
    floors = group.ranks_per_node == group.num_ranks
                 ? measure_floors(routing, options, peers, gpu, blocker)
                 : measure_rail_floors(routing, group.ranks_per_node, options, peers, gpu, blocker);
  }
  std::optional<NativeMeasurements> native;
#if defined(EPX_BENCH_HAS_MOE)
  if (options.native) native = measure_native(measured, sets, workload, options, peers, gpu, blocker);
#endif
  blocker.release(peers);
  GpuFigures result{
      compute_figures(measurements.lines, floors, survey, sampler.counted(options)), {}, measurements.environment};
  for (OperationFigures& figures : result.figures)
    figures.throttled = measurements.environment.throttled_samples;
  if (native) result.native = compute_native_figures(*native, result.figures, survey, options);
  return result;
}
#endif

} // namespace

Results measure_point(const Options& options, const epx_bootstrap& bootstrap, const Peers& peers, Memory& memory,
                      int ranks_here, [[maybe_unused]] Pacer& pacer) {
  peers.together([&] { require_memory(options, peers.num_ranks(), 0, available_memory(ranks_here)); });
  std::optional<Workload> workload;
  std::optional<MeasuredGroup> measured;
  std::vector<InputSet> sets(options.num_input_sets());
  peers.together([&] { workload.emplace(options, peers.num_ranks()); });
  peers.together([&] { measured.emplace(bootstrap, options, memory); }); // refuses shapes too large for memory
  peers.together([&] {
    for (int set = 0; set < std::ssize(sets); ++set)
      sets[set].by_token = workload->token_inputs(set, peers.rank());
  });
  check_nodes(options, measured->info());
  peers.together([&] { check_gather_fits(options, measured->info(), memory); });
  const Survey survey = bench::survey(*measured, sets, options, peers);
  check_drops(options, survey, measured->info());
  const int64_t rows = survey.max_rows + (options.is_rank_major() ? 0 : kSpareRows); // rank-major: their number is P * M
  peers.together([&] { require_memory(options, peers.num_ranks(), rows, available_memory(ranks_here)); });
  peers.together([&] {
    measured->allocate_rows(rows);
    const int row_sets = memory.is_host() ? static_cast<int>(sets.size()) : 1; // see measure_on_gpu()
    for (int set = 0; set < row_sets; ++set)
      sets[set].by_row = workload->row_inputs(set, peers.rank(), measured->rows());
  });

  Results results;
  results.options = options;
  results.library_version = epx_version();
  results.group = measured->info();
  results.group_creation_ms = std::ranges::max(peers.gather(measured->creation_ms()));
  results.handle_mem_bytes = static_cast<int64_t>(measured->handle_mem_bytes());
  results.handle_mem_limit = handle_memory_limit(options, measured->info());
  results.dropped_routes = dropped_routes(survey, options.top_k);
  if (options.verify) results.wrong = verify(*measured, *workload, options, peers);
#if defined(EPX_WITH_CUDA)
  if (options.transport == EPX_TRANSPORT_NCCL) {
    GpuFigures on_gpu = bench_on_gpu(*measured, sets, survey, *workload, options, peers, dynamic_cast<Gpu&>(memory));
    results.figures = std::move(on_gpu.figures);
    results.native = std::move(on_gpu.native);
    results.environment = on_gpu.environment;
  } else
#endif
  {
    Sampler sampler(options, lines_of(options).size(), peers);
    const Measurements measurements = measure(*measured, sets, survey, options, peers, sampler);
    results.figures = compute_figures(measurements, {}, survey, sampler.counted(options));
  }
#if defined(EPX_BENCH_HAS_MOE)
  if (options.block.is_measured)
    results.block = bench_block(*measured, sets, results.figures, options, bootstrap, peers, memory, pacer);
#endif
  results.events = gather_events(*measured, peers);
  return results;
}

} // namespace epx::bench
