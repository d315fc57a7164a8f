// SPDX-License-Identifier: Apache-2.0
// ep_bench: measures and verifies the exchange from the command line. Wiring only.
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <fmt/format.h>

#include "epx/epx.hpp"
#if defined(EPX_BENCH_HAS_MOE)
#include "tools/ep_bench/block/npy.h"
#endif
#include "tools/ep_bench/compare/command.h"
#include "tools/ep_bench/document.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/interrupt.h"
#include "tools/ep_bench/launcher.h"
#include "tools/ep_bench/machines.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/memory_need.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/pacer.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/point.h"
#include "tools/ep_bench/progress.h"
#include "tools/ep_bench/report.h"
#include "tools/ep_bench/starts.h"
#include "tools/ep_bench/sweep.h"
#if defined(EPX_WITH_CUDA)
#include "tools/ep_bench/gpu/communicator.h"
#include "tools/ep_bench/gpu/gpu_monitor.h"
#endif

namespace epx::bench {
namespace {

using Arguments = std::span<const char* const>;

// The device of `options` has been made.
MachineFacts describe_machine([[maybe_unused]] const Options& options) {
  MachineFacts machine = this_machine_facts();
#if defined(EPX_WITH_CUDA)
  if (options.transport == EPX_TRANSPORT_NCCL) {
    GpuMonitor().describe(machine);
    machine.nccl = nccl_version();
  }
#endif
  return machine;
}

int bench(const Launcher& launcher, const Sweep& sweep, Arguments arguments) {
  const Options& common = sweep.common();
  const int64_t timeout_ms = group_config(common).timeout_ms;
  const epx::Bootstrap bootstrap = launcher.make_bootstrap(common, timeout_ms);
  const Peers peers(bootstrap, timeout_ms);
  const bool is_root = peers.rank() == 0;
  const int ranks_here = Machines(peers).num_ranks_here();

  Pacer pacer(common.is_paced);
  std::unique_ptr<Memory> memory;
  std::optional<Document> document; // only on rank 0
  peers.together([&] {
    if (sweep.points.size() == 1) require_memory(common, peers.num_ranks(), 0, available_memory(ranks_here));
#if defined(EPX_BENCH_HAS_MOE)
    if (!common.block.dump_directory.empty()) require_directory(common.block.dump_directory);
#endif
    pacer.begin();
  });
  peers.together([&] { memory = make_memory(common, peers.rank()); });
  peers.together([&] {
    if (!is_root || common.json_file.empty()) return;
    document.emplace(sweep, RunFacts{{arguments.begin(), arguments.end()},
                                     utc_now(),
                                     peers.num_ranks(),
                                     describe_machine(common),
                                     tuning_of_environment()});
  });

  Progress progress(sweep.points.size(), is_root);
  const auto measure = [&](const Options& options) {
    return measure_point(options, bootstrap, peers, *memory, ranks_here, pacer);
  };
  const auto report = [&](std::span<const PointResult> points, bool is_last) {
    if (!is_root) return;
    if (is_last) fmt::print("{}", to_table(sweep, points));
    std::fflush(stdout);
    if (document) document->write(points, is_last);
  };
  const std::vector<PointResult> points = run_sweep(sweep, peers, measure, report, progress);
  peers.together([&] {
    for (const PointResult& point : points)
      if (point.results && point.results->block && !point.results->block->dump_failure.empty())
        throw RuntimeError(point.results->block->dump_failure);
  });
  return exit_status(points);
}

// One rank prints a failure that all ranks know of; any other is printed by each rank.
int run(const Sweep& sweep, Arguments arguments) {
  if (sweep.common().starts > 1) return run_starts(arguments, sweep.common());
  Launcher launcher(sweep.common());
  catch_signals();
  try {
    return bench(launcher, sweep, arguments);
  } catch (const AgreedError& error) {
    if (launcher.rank() == 0) fmt::print(stderr, "ep_bench: {}\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    fmt::print(stderr, "ep_bench: rank {}: {}\n", launcher.rank(), describe(error));
    launcher.abandon(kExitFailure);
    return kExitFailure;
  }
}

} // namespace
} // namespace epx::bench

int main(int argc, char** argv) {
  using namespace epx::bench;
  if (argc > 1 && argv[1] == kCompare) return run_compare({argv + 1, argv + argc});
  try {
    const std::variant<Sweep, RequestedText> parsed = parse_options(argc, argv);
    if (const auto* sweep = std::get_if<Sweep>(&parsed)) return run(*sweep, {argv, argv + argc});
    say_once(stdout, std::get<RequestedText>(parsed).text, {argv, argv + argc});
    return 0;
  } catch (const UsageError& error) {
    say_once(stderr, fmt::format("ep_bench: {}\n", error.what()), {argv, argv + argc});
    return kExitUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "ep_bench: {}\n", epx::describe(error));
    return kExitFailure;
  }
}
