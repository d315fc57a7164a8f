// SPDX-License-Identifier: Apache-2.0
// property [--cases N] [--seed S] [--transport host|nccl]
// Random cases against the oracle, ranks as threads of this process; every eighth also checks that `exact` combine does not
// depend on the number of ranks. Case i has seed S + i: `--seed (S + i) --cases 1` runs it alone.
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "tests/emulation/nodes.h"
#include "tests/multiprocess/independence.h"
#include "tests/support/check.h"
#include "tests/support/launcher.h"
#include "tests/support/layer_run.h"

namespace {

using namespace epx::test;

struct Options {
  uint64_t cases = 2000;
  uint64_t seed = 0;
  std::string transport = "host";
};

uint64_t parse_number(const std::string& name, const std::string& text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  check(error == std::errc() && end == text.data() + text.size(), "{} is \"{}\", not a number", name, text);
  return number;
}

Options parse(int argc, char** argv) {
  Options options;
  options.seed = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    check(i + 1 < argc, "{} has no value", name);
    if (name == "--cases")
      options.cases = parse_number(name, argv[i + 1]);
    else if (name == "--seed")
      options.seed = parse_number(name, argv[i + 1]);
    else if (name == "--transport")
      options.transport = argv[i + 1];
    else
      fail_check("unknown option {}", name);
  }
  return options;
}

bool can_make_nodes(const std::string& transport) {
  return transport == "host" || epx_emulation_set_ranks_per_node != nullptr;
}

// These events are counted over all cases, and a long run in which one of them never happens fails.
struct Coverage {
  uint64_t overflow = 0, bad_index = 0, beyond_rows = 0, no_local_expert = 0, many_ranks = 0, several_nodes = 0,
           by_node = 0, formats = 0, zone_strides = 0, compact = 0;

  void add(Workloads& workloads) {
    const Case& c = workloads.test_case();
    bool seen[3] = {};
    for (int i = 0; i < c.iterations; ++i) {
      const Workload& work = workloads[i];
      for (size_t rank = 0; rank < work.plan.ranks.size(); ++rank) {
        const auto& plan = work.plan.ranks[rank];
        seen[0] |= plan.info[2] > 0;
        seen[1] |= plan.bad_indices > 0;
        seen[2] |= routes_beyond(plan, work.dispatch.recv_tokens[rank].rows) > 0;
      }
    }
    overflow += seen[0];
    bad_index += seen[1];
    beyond_rows += seen[2];
    no_local_expert += c.group.num_experts < c.group.num_ranks;
    many_ranks += c.group.num_ranks == 7;
    several_nodes += num_nodes(c.group) > 1;
    by_node += num_nodes(c.group) > 1 && c.group.precision == EPX_COMBINE_NODE;
    formats += c.layer.format.is_quantised();
    zone_strides += c.layer.zone_stride > 0;
    compact += c.layer.rank_major != RankMajorRows::absent && c.layer.rank_major_compact;
  }

  void report(uint64_t cases, const std::string& transport) const {
    std::printf(
        "of them %lu with overflow, %lu with bad indices, %lu with too few rows, %lu with E < P, %lu on 7 ranks, %lu on "
        "several nodes, %lu of these with sums by node; %lu with a row format, %lu with zones a stride apart, %lu with "
        "compact rank-major rows\n",
        overflow, bad_index, beyond_rows, no_local_expert, many_ranks, several_nodes, by_node, formats, zone_strides,
        compact);
    if (cases < 1000) return;
    check((several_nodes > 0 && by_node > 0) == can_make_nodes(transport),
          "the generator no longer makes groups of several nodes");
    for (const uint64_t met :
         {formats, zone_strides, compact, overflow, bad_index, beyond_rows, no_local_expert, many_ranks}) {
      check(met > 0, "the generator no longer makes one of these");
    }
  }
};

void run_one(uint64_t seed, const std::string& transport, Coverage& coverage) {
  Case chosen = random_case(seed);
  if (!can_make_nodes(transport)) chosen.group.ranks_per_node = 0; // one machine is one node there
  Workloads workloads(chosen);
  const Case& c = workloads.test_case();
  try {
    make_thread_launcher(transport, c.group.num_ranks)->each_rank([&](const RankContext& context) {
      if (epx_emulation_set_ranks_per_node != nullptr) epx_emulation_set_ranks_per_node(c.group.ranks_per_node);
      run_case(context, workloads);
    });
  } catch (const std::exception& error) {
    fail_check("{}\n  in case {}\n  again with: property --seed {} --cases 1", describe(error), describe(c), seed);
  }
  coverage.add(workloads);
  if (seed % 8 != 0) return;
  try {
    check_independence(seed, transport);
  } catch (const std::exception& error) {
    fail_check("exact combine depends on the number of ranks: {}\n  again with: property --seed {} --cases 1", error.what(),
               seed);
  }
}

} // namespace

int main(int argc, char** argv) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    const Options options = parse(argc, argv);
    std::printf("%lu cases from seed %lu\n", options.cases, options.seed);
    std::fflush(stdout);
    check(options.cases > 0, "no cases");
    Coverage coverage;
    for (uint64_t i = 0; i < options.cases; ++i)
      run_one(options.seed + i, options.transport, coverage);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("%lu cases, %ld checks, none failed, %.1f s; ", options.cases, num_checks(), seconds.count());
    coverage.report(options.cases, options.transport);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return 1;
  }
}
