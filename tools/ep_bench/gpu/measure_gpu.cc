// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/gpu/measure_gpu.h"

#include <vector>

#include <fmt/format.h>
#include <nvtx3/nvtx3.hpp>

#include "tools/ep_bench/gpu/gpu_monitor.h"

namespace epx::bench {
namespace {

// Captures one graph per line of the table, with one input set.
std::vector<Graph> capture(MeasuredGroup& measured, std::span<const Line> lines, const TokenTensors& inputs,
                           cudaStream_t stream) {
  std::vector<Graph> graphs;
  for (const Line& line : lines)
    graphs.push_back(Graph::capture(stream, [&] { measured.call(line, inputs); }));
  return graphs;
}

} // namespace

GpuMeasurements measure_on_gpu(MeasuredGroup& measured, std::span<const InputSet> sets, const Options& options,
                               const Peers& peers, Gpu& gpu, StreamBlocker& blocker, Sampler& sampler) {
  const cudaStream_t stream = gpu.cuda_stream();
  const std::span<const Line> lines = lines_of(options);
  // Calls of a group of several nodes may wait on the host for the stream, and they are many launches each.
  const bool is_blocked = options.graph || measured.info().ranks_per_node == measured.info().num_ranks;
  std::vector<TokenTensors> tensors;
  std::vector<std::vector<Graph>> graphs; // [set][line]
  std::vector<Stopwatch> watches(lines.size());
  peers.together([&] {
    for (const InputSet& set : sets)
      tensors.push_back(measured.tensors_of(set.by_token));
    measured.load(sets[0].by_row);
    if (options.graph)
      for (const TokenTensors& inputs : tensors)
        graphs.push_back(capture(measured, lines, inputs, stream));
    // One call of each line precedes the first block(): a first launch may wait for the stream, which would then wait for the
    // host.
    for (const Line& line : lines)
      measured.call(line, tensors[0]);
    for (const std::vector<Graph>& of_set : graphs)
      for (const Graph& graph : of_set)
        graph.replay(stream);
    measured.finish();
  });

  GpuMonitor monitor;
  std::vector<GpuReading> readings;
  std::vector<std::vector<int64_t>> times(lines.size());
  while (sampler.next()) {
    const size_t set = sampler.iteration() % sets.size();
    Failure failure;
    if (is_blocked) blocker.block();
    for (size_t line = 0; line < lines.size(); ++line) {
      blocker.rank_barrier(); // it is queued after a failure, too, because the others wait for this rank
      if (failure.exit_code != 0) continue;
      failure = attempt([&] {
        const nvtx3::scoped_range range(fmt::format("{} {}", lines[line].name, sampler.iteration()));
        watches[line].start(stream);
        if (options.graph)
          graphs[set][line].replay(stream);
        else
          measured.call(lines[line], tensors[set]);
        watches[line].stop(stream);
      });
    }
    if (is_blocked) blocker.unblock();
    if (failure.exit_code == 0)
      failure = attempt([&] {
        measured.finish();
        blocker.check();
      });
    peers.agree(failure);
    for (size_t line = 0; line < lines.size(); ++line) {
      const int64_t elapsed_ns = watches[line].elapsed_ns();
      sampler.add(line, elapsed_ns);
      if (sampler.is_timed()) times[line].push_back(elapsed_ns);
    }
    if (sampler.is_timed()) readings.push_back(monitor.read());
  }

  GpuMeasurements measurements;
  for (const std::vector<int64_t>& of_line : times)
    measurements.lines.push_back({.call = gather_durations(of_line, peers), .copy = {}});
  measurements.environment = summarise(peers.gather(std::span<const GpuReading>(readings)), peers.num_ranks());
  return measurements;
}

} // namespace epx::bench
