// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tools/ep_bench/block/epx_layer.h"
#include "tools/ep_bench/block/native_layer.h"
#include "tools/ep_bench/block/npy.h"
#include "tools/ep_bench/block/pieces.h"
#include "tools/ep_bench/block/shape.h"
#include "tools/ep_bench/block/weight_gather.h"
#include "tools/ep_bench/errors.h"
#if defined(EPX_WITH_CUDA)
#include "tools/ep_bench/block/dense_bound.h"
#include "tools/ep_bench/gpu/communicator.h"
#include "tools/ep_bench/gpu/measure_gpu.h"
#include "tools/ep_bench/gpu/stream_blocker.h"
#include "tools/ep_bench/native/gpu_all_to_all.h"
#endif

namespace epx::bench {
namespace {

// What the two layers' sums may differ by, relative to the largest element: they add in another order, and with wire precision
// the block rounds partial sums.
constexpr double kFp32Limit = 1e-4, kBf16Limit = 4e-2;
// Experts in FP8 beside those that are not: an E4M3 product of Gaussian numbers is off by 3.8e-2 in the norm, and its
// largest error is several times as large.
constexpr double kFp8Limit = 0.3;

using Layers = std::vector<std::unique_ptr<BlockLayer>>;

std::unique_ptr<AllToAll> make_all_to_all([[maybe_unused]] const Options& options, const Peers& peers,
                                          [[maybe_unused]] Memory& memory, [[maybe_unused]] int64_t max_rows) {
#if defined(EPX_WITH_CUDA)
  if (!memory.is_host()) return std::make_unique<GpuAllToAll>(peers, dynamic_cast<Gpu&>(memory), options.experts, max_rows);
#endif
  return std::make_unique<BootstrapAllToAll>(peers);
}

// The block is first, then come the one with a recipe and the one with a path, if they are wanted, and the native layer is last.
Layers make_layers(MeasuredGroup& measured, const Options& options, const Peers& peers, const BlockData& data,
                   Memory& memory) {
  const std::vector<int32_t> first_experts = peers.gather(measured.info().first_local_expert);
  std::unique_ptr<AllToAll> all_to_all = make_all_to_all(options, peers, memory, measured.rows());
  Layers layers;
  const auto add_block = [&](epx_moe_recipe recipe, epx_moe_path path) {
    peers.together(
        [&] { layers.push_back(std::make_unique<EpxLayer>(measured.group(), options, recipe, path, data, memory)); });
  };
  add_block(EPX_MOE_RECIPE_WIDE, EPX_MOE_PATH_DISPATCH);
  if (options.block.recipe != EPX_MOE_RECIPE_WIDE) add_block(options.block.recipe, EPX_MOE_PATH_DISPATCH);
  if (options.block.path != EPX_MOE_PATH_DISPATCH) add_block(EPX_MOE_RECIPE_WIDE, options.block.path);
  peers.together([&] {
    layers.push_back(std::make_unique<NativeLayer>(options, peers.rank(), first_experts, measured.rows(), data, memory,
                                                   std::move(all_to_all)));
  });
  return layers;
}

// Returns what the layer writes over outputs that were no numbers before.
std::vector<BlockData::Output> run_once(BlockLayer& layer, MeasuredGroup& measured, const BlockData& data,
                                        const Options& options, const Peers& peers) {
  std::vector<BlockData::Output> outputs;
  peers.together([&] {
    data.scribble();
    layer.forward();
    layer.backward();
    measured.finish();
    outputs = data.outputs(options.block.dump_rows);
  });
  return outputs;
}

void dump(const std::vector<BlockData::Output>& outputs, const BlockLayer& layer, const Options& options, int rank) {
  for (const BlockData::Output& output : outputs)
    write_npy(fmt::format("{}/{}.{}.{}.npy", options.block.dump_directory, layer.name(), output.name, rank), output.shape,
              output.values);
}

void compare(const std::vector<BlockData::Output>& block, const BlockLayer& layer,
             const std::vector<BlockData::Output>& outputs, double limit, const Peers& peers,
             std::vector<BlockDifference>& differences) {
  for (size_t i = 0; i < block.size(); ++i) {
    double largest = 0, scale = 0;
    for (size_t j = 0; j < block[i].values.size(); ++j) {
      const double difference = std::abs(double{outputs[i].values[j]} - block[i].values[j]);
      if (!(difference <= largest)) largest = difference; // keeps a NaN
      scale = std::max(scale, std::abs(double{block[i].values[j]}));
    }
    for (const double of_rank : peers.gather(largest))
      if (!(of_rank <= largest)) largest = of_rank;
    scale = std::ranges::max(peers.gather(scale));
    differences.push_back({layer.name(), block[i].name, largest, scale, limit});
  }
}

// All layers beside the first.
std::vector<BlockDifference> compare_all(const Layers& layers, const std::vector<std::vector<BlockData::Output>>& outputs,
                                         const Options& options, const Peers& peers) {
  std::vector<BlockDifference> differences;
  for (size_t i = 1; i < layers.size(); ++i) {
    const double wide_limit = options.dtype == EPX_FLOAT32 ? kFp32Limit : kBf16Limit;
    compare(outputs[0], *layers[i], outputs[i], layers[i]->quantises_weights() ? kFp8Limit : wide_limit, peers,
            differences);
  }
  return differences;
}

// The times of a line in all rounds so far, [rank][iteration].
struct LineTimes {
  std::vector<Series> ranks, paused_ranks;
  std::vector<double> rounds_us; // the median of each round
};

void append(std::vector<Series>& to, const std::vector<Series>& more) {
  to.resize(more.size());
  for (size_t rank = 0; rank < more.size(); ++rank)
    to[rank].insert(to[rank].end(), more[rank].begin(), more[rank].end());
}

Quartiles quartiles_of(const std::vector<double>& times) {
  return {percentile(times, 25), percentile(times, 75)};
}

BlockFigures figures_of(std::string name, const LineTimes& line) {
  const std::vector<double> times = slowest_us(line.ranks);
  BlockFigures figures;
  figures.name = std::move(name);
  figures.median_us = median(times);
  figures.p99_us = percentile(times, 99);
  figures.min_us = minimum(times);
  figures.quartiles = quartiles_of(times);
  figures.rounds_us = line.rounds_us;
  figures.slowest_rank = most_often_slowest(line.ranks);
  if (line.paused_ranks.empty()) return figures;
  const std::vector<double> paused = slowest_us(line.paused_ranks);
  figures.paused_us = median(paused);
  figures.paused_quartiles = quartiles_of(paused);
  return figures;
}

// A line of the table. `products` counts products forward: 1 forward, 2 backward, 3 both.
struct BlockLine {
  std::string name;
  int products = 0;
  std::function<void()> run;
};

std::string line_beside(const std::string& line, GatherForm form) {
  return fmt::format("{} + {}", line, gather_line(form));
}

void run_both(BlockLayer& layer) {
  layer.forward();
  layer.backward();
}

// Gathers on another stream, which begins before the layer's forward, and joins both.
void run_both_beside(WeightGather& gather, GatherForm form, BlockLayer& layer) {
  gather.start(form);
  run_both(layer);
  gather.join();
}

// `gather` is NULL where nothing is to be gathered beside the layer.
std::vector<BlockLine> lines_of(BlockLayer& layer, WeightGather* gather, const Options& options) {
  std::vector<BlockLine> lines{{fmt::format("{} fwd", layer.name()), 1, [&] { layer.forward(); }},
                               {fmt::format("{} fwd+bwd", layer.name()), 3, [&] { run_both(layer); }}};
  if (gather != nullptr)
    for (const GatherForm form : options.block.gathers)
      lines.push_back(
          {line_beside(lines[1].name, form), 0, [gather, form, &layer] { run_both_beside(*gather, form, layer); }});
  if (layer.quantises_weights())
    lines.push_back({fmt::format("{} weights", layer.name()), 0, [&] { layer.quantise_weights(); }});
  return lines;
}

// `gather` is NULL without --gather.
std::vector<BlockLine> lines_of(WeightGather* gather, const Options& options) {
  std::vector<BlockLine> lines;
  for (const GatherForm form : options.block.gathers)
    lines.push_back({gather_line(form), 0, [gather, form] {
                       gather->start(form);
                       gather->join();
                     }});
  return lines;
}

int per_round(int iterations, const Options& options) {
  return (iterations + options.block.rounds - 1) / options.block.rounds;
}

// Measures every line in each round: the rounds of a line are apart in time, and so is what they have of a GPU's clocks.
// `time` (line, LineTimes&) adds one round of a line.
template <typename Time>
std::vector<BlockFigures> measure_in_rounds(const std::vector<BlockLine>& lines, const Options& options, const Peers& peers,
                                            Pacer& pacer, Time&& time) {
  std::vector<LineTimes> times(lines.size());
  for (int round = 0; round < options.block.rounds; ++round) {
    peers.together([&] { pacer.begin(); });
    for (size_t i = 0; i < lines.size(); ++i)
      time(lines[i], times[i]);
    pacer.end();
  }
  std::vector<BlockFigures> figures;
  for (size_t i = 0; i < lines.size(); ++i) {
    figures.push_back(figures_of(lines[i].name, times[i]));
    if (lines[i].products > 0) figures[i].tflops = lines[i].products * forward_flops(options) / figures[i].median_us / 1e6;
  }
  return figures;
}

// On the host the native layer's exchange is no baseline, and is not timed.
std::vector<BlockFigures> measure_on_host(const Layers& layers, WeightGather* gather, const Options& options,
                                          const Peers& peers, Pacer& pacer) {
  pacer.end();
  std::vector<BlockLine> lines = lines_of(gather, options);
  for (size_t i = 0; i + 1 < layers.size(); ++i)
    for (BlockLine& line : lines_of(*layers[i], gather, options))
      lines.push_back(std::move(line));
  return measure_in_rounds(lines, options, peers, pacer, [&](const BlockLine& line, LineTimes& all) {
    std::vector<int64_t> times;
    Failure failure; // of the last iteration; the next barrier carries it to the other ranks
    for (int iteration = 0; iteration < options.warmup + per_round(options.iterations, options); ++iteration) {
      peers.start_together(failure);
      const auto begin = std::chrono::steady_clock::now();
      failure = attempt(line.run);
      const auto elapsed = std::chrono::steady_clock::now() - begin;
      if (iteration >= options.warmup)
        times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count());
    }
    peers.agree(failure);
    const std::vector<Series> ranks = gather_durations(times, peers);
    all.rounds_us.push_back(median(slowest_us(ranks)));
    append(all.ranks, ranks);
  });
}

#if defined(EPX_WITH_CUDA)

std::string cuda_version(int number) {
  return fmt::format("{}.{}", number / 1000, number % 1000 / 10);
}

// Returns the versions of CUDA's runtime, its driver and NCCL as this process has loaded them, by name. Throws RuntimeError.
std::map<std::string, std::string> loaded_libraries() {
  int runtime = 0, driver = 0;
  check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  return {{"CUDA runtime", cuda_version(runtime)}, {"CUDA driver", cuda_version(driver)}, {"NCCL", nccl_version()}};
}

// Sums up the wire bounds of the operations from `first` to `last` of the exchange's lines.
std::optional<double> wire_us(const Figures& exchange_figures, std::initializer_list<epx_operation> operations) {
  double sum = 0;
  for (const epx_operation operation : operations) {
    const auto line = std::ranges::find(kLines, operation, &Line::operation) - kLines.begin();
    if (!exchange_figures[line].floor) return std::nullopt;
    sum += exchange_figures[line].floor->wire_us;
  }
  return sum;
}

class GpuBlockBench {
public:
  GpuBlockBench(MeasuredGroup& measured, const Options& options, const Peers& peers, Gpu& gpu)
      : measured_(measured), options_(options), peers_(peers), gpu_(gpu), blocker_(gpu, peers, measured.info().timeout_ms) {
  }

  std::vector<BlockFigures> measure(Layers& layers, WeightGather* gather, BlockPieces& pieces, DenseBound& dense,
                                    const Figures& exchange_figures, Pacer& pacer) {
    std::vector<BlockLine> lines{{"router", 0, [&] { pieces.router(); }},
                                 {"ffn", 1, [&] { pieces.ffn(); }},
                                 {"ffn_bwd", 2, [&] { pieces.ffn_bwd(); }},
                                 {"router_bwd", 0, [&] { pieces.router_bwd(); }}};
    const std::vector<BlockLine> bounds{
        {"dense fwd", 1, [&] { dense.forward(); }}, {"dense bwd", 2, [&] { dense.backward(); }}, {"dense fwd+bwd", 3, [&] {
                                                                                                    dense.forward();
                                                                                                    dense.backward();
                                                                                                  }}};
    lines.insert(lines.end(), bounds.begin(), bounds.end());
    const std::vector<BlockLine> gathers = lines_of(gather, options_);
    lines.insert(lines.end(), gathers.begin(), gathers.end());
    std::vector<Graph> graphs;
    graphs.reserve(2 * layers.size()); // lines point to them
    for (const std::unique_ptr<BlockLayer>& layer : layers)
      for (const BlockLine& line : lines_of(*layer, layer == layers.back() ? nullptr : gather, options_)) {
        lines.push_back(line);
        if (!options_.graph || !layer->can_be_captured() || line.products == 0) continue;
        peers_.together([&] { graphs.push_back(Graph::capture(gpu_.cuda_stream(), line.run)); });
        lines.push_back({line.name + " graph", line.products,
                         [&graph = graphs.back(), stream = gpu_.cuda_stream()] { graph.replay(stream); }});
      }

    pacer.end(); // of the set-up
    std::vector<BlockFigures> figures = measure_in_rounds(
        lines, options_, peers_, pacer, [this](const BlockLine& line, LineTimes& times) { add_round(line, times); });
    for (size_t i = 0; i < lines.size(); ++i)
      set_bounds(figures[i], lines[i], figures, exchange_figures);
    return figures;
  }

  void release() { blocker_.release(peers_); }

private:
  void add_round(const BlockLine& line, LineTimes& times) {
    const std::vector<Series> ranks = time(line, per_round(options_.iterations, options_), false);
    times.rounds_us.push_back(median(slowest_us(ranks)));
    append(times.ranks, ranks);
    if (options_.block.pause_ms > 0)
      append(times.paused_ranks, time(line, per_round(std::max(options_.iterations / 4, 5), options_), true));
  }

  // Without pauses the iterations are enqueued as fast as the host can, so that the GPU does not cool down between them; with
  // them each follows a pause of all ranks, and the iterations before have warmed up.
  std::vector<Series> time(const BlockLine& line, int iterations, bool has_pauses) {
    const int warmup = has_pauses ? 0 : std::max(options_.warmup, 1);
    std::vector<Stopwatch> watches(static_cast<size_t>(warmup + iterations));
    Failure failure;
    for (Stopwatch& watch : watches) {
      if (has_pauses) {
        if (failure.exit_code == 0) failure = attempt([&] { measured_.finish(); });
        peers_.agree(failure);
        std::this_thread::sleep_for(std::chrono::milliseconds(options_.block.pause_ms));
      }
      blocker_.rank_barrier(); // it is queued after a failure, too, because the others wait for this rank
      if (failure.exit_code != 0) continue;
      failure = attempt([&] {
        watch.start(gpu_.cuda_stream());
        line.run();
        watch.stop(gpu_.cuda_stream());
      });
    }
    std::vector<int64_t> times;
    if (failure.exit_code == 0)
      failure = attempt([&] {
        measured_.finish();
        blocker_.check();
        for (size_t i = static_cast<size_t>(warmup); i < watches.size(); ++i)
          times.push_back(watches[i].elapsed_ns());
      });
    peers_.agree(failure);
    return gather_durations(times, peers_);
  }

  static void set_bounds(BlockFigures& figures, const BlockLine& line, std::span<const BlockFigures> all,
                         const Figures& exchange_figures) {
    if (line.products == 0 || line.name.starts_with("block-")) return; // the bounds are of rows and products in --dtype
    const char* const bound = line.products == 1 ? "dense fwd" : line.products == 2 ? "dense bwd" : "dense fwd+bwd";
    const auto dense = std::ranges::find(all, bound, &BlockFigures::name);
    figures.dense_us = dense->median_us;
    figures.paused_dense_us = dense->paused_us;
    if (!line.name.starts_with("block") && !line.name.starts_with("native")) return;
    figures.wire_us =
        line.products == 1
            ? wire_us(exchange_figures, {EPX_OP_DISPATCH, EPX_OP_COMBINE})
            : wire_us(exchange_figures, {EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD});
  }

  MeasuredGroup& measured_;
  const Options& options_;
  const Peers& peers_;
  Gpu& gpu_;
  StreamBlocker blocker_;
};

std::vector<BlockFigures> measure_on_gpu(Layers& layers, WeightGather* gather, MeasuredGroup& measured, const InputSet& set,
                                         const Figures& figures, const Options& options, const Peers& peers,
                                         const BlockData& data, Gpu& gpu, Pacer& pacer) {
  std::unique_ptr<BlockPieces> pieces;
  std::unique_ptr<DenseBound> dense;
  peers.together([&] {
    pieces = std::make_unique<BlockPieces>(options, measured, data, gpu);
    dense = std::make_unique<DenseBound>(options, gpu);
    const TokenTensors inputs = measured.tensors_of(set.by_token);
    measured.prepare(inputs);
    measured.dispatch(inputs);
    measured.combine_bwd(inputs);
    pieces->router();
    pieces->ffn();
    pieces->ffn_bwd();
    pieces->router_bwd();
    measured.finish();
    pieces->keep_memory();
  });
  GpuBlockBench bench(measured, options, peers, gpu);
  std::vector<BlockFigures> lines = bench.measure(layers, gather, *pieces, *dense, figures, pacer);
  bench.release();
  return lines;
}

#endif

std::vector<GatherFigures> gather_figures(const WeightGather& gather, const std::vector<BlockFigures>& lines,
                                          const Options& options, const Peers& peers) {
  std::vector<GatherFigures> gathers;
  const auto find = [&](const std::string& name) { return std::ranges::find(lines, name, &BlockFigures::name); };
  for (const GatherForm form : options.block.gathers) {
    GatherFigures& figures = gathers.emplace_back();
    figures.form = form;
    figures.line = gather_line(form);
    figures.median_us = find(figures.line)->median_us;
    figures.received_bytes = std::ranges::max(peers.gather(gather.received_bytes(form)));
    for (const BlockFigures& alone : lines)
      if (const auto beside = find(line_beside(alone.name, form)); beside != lines.end())
        figures.added_percent.emplace_back(alone.name, (beside->median_us / alone.median_us - 1) * 100);
  }
  return gathers;
}

// Gathers beside a forward and a backward of the layer. No rank gathers before all have scribbled.
int64_t count_wrong(WeightGather& gather, GatherForm form, BlockLayer& layer, MeasuredGroup& measured, const Peers& peers) {
  peers.together([&] { gather.scribble(form); });
  int64_t wrong = 0;
  peers.together([&] {
    run_both_beside(gather, form, layer);
    measured.finish();
    gather.check();
    wrong = gather.count_wrong(form);
  });
  const std::vector<int64_t> of_ranks = peers.gather(wrong);
  return std::accumulate(of_ranks.begin(), of_ranks.end(), int64_t{0});
}

} // namespace

BlockResults bench_block(MeasuredGroup& measured, [[maybe_unused]] std::span<const InputSet> sets,
                         [[maybe_unused]] const Figures& exchange_figures, const Options& options,
                         const epx_bootstrap& bootstrap, const Peers& peers, Memory& memory, Pacer& pacer) {
  BlockResults results;
  const OwnedExperts experts{measured.info().first_local_expert, measured.info().num_local_experts};
  std::unique_ptr<BlockData> data;
  peers.together([&] { data = std::make_unique<BlockData>(options, peers.rank(), experts, memory); });
  Layers layers = make_layers(measured, options, peers, *data, memory);
  for (const std::unique_ptr<BlockLayer>& layer : layers)
    peers.together([&] {
      layer->forward();
      layer->backward();
      measured.finish();
      layer->keep_memory();
    });

  std::unique_ptr<WeightGather> gather;
  if (!options.block.gathers.empty()) {
    peers.together([&] { gather = std::make_unique<WeightGather>(bootstrap, options, peers, memory); });
    peers.together([&] {
      for (const GatherForm form : options.block.gathers) {
        gather->start(form);
        gather->join();
      }
      measured.finish();
      gather->check();
    });
  }

  if (memory.is_host()) results.lines = measure_on_host(layers, gather.get(), options, peers, pacer);
#if defined(EPX_WITH_CUDA)
  else {
    results.lines = measure_on_gpu(layers, gather.get(), measured, sets[0], exchange_figures, options, peers, *data,
                                   dynamic_cast<Gpu&>(memory), pacer);
    results.libraries = loaded_libraries();
  }
#endif

  if (gather) {
    peers.together([&] { gather->check(); });
    results.gathers = gather_figures(*gather, results.lines, options, peers);
    results.gathered_experts = gathered_experts(options, peers.num_ranks());
  }

  peers.together([&] { pacer.begin(); });
  if (options.verify)
    for (GatherFigures& figures : results.gathers)
      figures.wrong = count_wrong(*gather, figures.form, *layers.front(), measured, peers);
  if (options.verify || !options.block.dump_directory.empty()) {
    std::vector<std::vector<BlockData::Output>> outputs;
    for (const std::unique_ptr<BlockLayer>& layer : layers) {
      outputs.push_back(run_once(*layer, measured, *data, options, peers));
      if (!options.block.dump_directory.empty() && results.dump_failure.empty())
        results.dump_failure = attempt([&] { dump(outputs.back(), *layer, options, peers.rank()); }).message;
    }
    results.differences = compare_all(layers, outputs, options, peers);
  }
  pacer.end();
  peers.together([&] {
    for (const std::unique_ptr<BlockLayer>& layer : layers)
      layer->release();
  });
  return results;
}

} // namespace epx::bench
