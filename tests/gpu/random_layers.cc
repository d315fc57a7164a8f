// SPDX-License-Identifier: Apache-2.0
// random_layers [--groups G] [--layers L] [--seed S]
// Compares L random layers with the oracle on each of G random groups. Group g has seed S + g; its layer l has seed
// (S + g) * 1000000 + l, so that `--seed (S + g) --groups 1` runs one group alone.
#include <cstdio>
#include <cstdlib>

#include "tests/gpu/suite.h"
#include "tests/support/case.h"
#include "tests/support/check.h"
#include "tests/support/layer_run.h"

namespace epx::test {
namespace {

void run_group(const RankContext& context, uint64_t group_seed, uint64_t layers) {
  Case described;
  described.group = random_group(group_seed, context.num_ranks);
  GroupRun group(context, described.group);
  group.add_arena(1 << 16);
  group.add_arena(1 << 18);
  for (uint64_t i = 0; i < layers; ++i) {
    described.seed = group_seed * 1'000'000 + i;
    described.layer = random_layer(described.group, described.seed);
    if (num_nodes(described.group) > 1) described.layer.rank_major = RankMajorRows::absent; // refused there
    try {
      LayerRun layer(group, described.layer, Placement::random, described.seed);
      run_iteration(group, layer, make_workload(described.group, described.layer, described.seed));
    } catch (const std::exception& failure) {
      fail_check("{}\n  in layer {} of group {}: {}", describe(failure), i, group_seed, describe(described));
    }
  }
}

void run_groups(const RankContext& context, uint64_t groups, uint64_t layers, uint64_t seed) {
  for (uint64_t group = 0; group < groups; ++group)
    run_group(context, seed + group, layers);
  if (context.rank == 0)
    std::printf("%llu random layers on %d ranks, seeds %llu to %llu\n", static_cast<unsigned long long>(groups * layers),
                context.num_ranks, static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(seed + groups - 1));
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  setenv("EPX_TEST_ALTERNATES_PATHS", "1", 1); // all layers are small enough for the low-latency path
  const auto groups = static_cast<uint64_t>(option(argc, argv, "--groups", 2));
  const auto layers = static_cast<uint64_t>(option(argc, argv, "--layers", 50));
  const auto seed = static_cast<uint64_t>(option(argc, argv, "--seed", 1));
  return run_suite({[&](const RankContext& context) { run_groups(context, groups, layers, seed); }});
}
