// SPDX-License-Identifier: Apache-2.0
// many_ranks [--ranks P] [--transport host|nccl]
// There are more ranks than a warp has lanes, and more routes of a token: what the kernels do 32 at a time they do twice here.
// The tokens are few, since ranks are threads of this process; every result is compared with the oracle's.
#include <charconv>
#include <cstdio>
#include <exception>
#include <string>

#include "tests/support/check.h"
#include "tests/support/launcher.h"
#include "tests/support/layer_run.h"
#include "tests/support/slices.h"

namespace {

using namespace epx::test;

struct Kind {
  epx_combine_precision precision;
  int top_k;
  int max_tokens;
  RoutingStyle routing;
  RankMajorRows rank_major = RankMajorRows::absent;
  bool is_for_ht_path = false; // as the one before it, but for the number of tokens
  int num_nodes = 1;           // of the host transport
};

// On one SM the routing all-gather takes up to 8192 routes of all ranks, and the LL path up to 2048 tokens of all ranks
// (runtime/layout/window_layout.h): on 40 ranks 204 routes each. So the kernels take the LL path for the first of each pair of
// these, and the HT path for the second, which the host transport leaves out.
// Of rank-major calls M decides instead. The rows of the repeated routes are compact, those of the others are not.
constexpr auto kExact = RankMajorRows::exact, kAbsent = RankMajorRows::absent;
constexpr Kind kKinds[] = {
    {EPX_COMBINE_WIRE, 40, 5, RoutingStyle::distinct, kExact},
    {EPX_COMBINE_WIRE, 40, 7, RoutingStyle::distinct, kExact, true},
    {EPX_COMBINE_EXACT, 64, 3, RoutingStyle::uniform},
    {EPX_COMBINE_EXACT, 64, 5, RoutingStyle::uniform, kAbsent, true},
    {EPX_COMBINE_WIRE, 64, 3, RoutingStyle::repeated, kExact},
    {EPX_COMBINE_WIRE, 64, 5, RoutingStyle::repeated, kExact, true},
    {EPX_COMBINE_EXACT, 3, 9, RoutingStyle::uniform},
    {EPX_COMBINE_NODE, 64, 3, RoutingStyle::uniform, kAbsent, false, 5},
};

Case make_case(const Kind& kind, int num_ranks, const std::string& transport) {
  Case test_case;
  GroupCase& group = test_case.group;
  group.num_ranks = num_ranks;
  group.num_experts = 2 * num_ranks + 3;
  group.max_tokens = kind.max_tokens;
  group.hidden_dim = 16;
  group.max_top_k = kind.top_k;
  group.max_alignment = 4;
  group.max_sidecar_bytes = 8;
  group.precision = kind.precision;
  group.num_comm_sms = 1; // each block is a thread of this process
  if (transport == "host" && num_ranks % kind.num_nodes == 0) group.ranks_per_node = num_ranks / kind.num_nodes;
  LayerCase& layer = test_case.layer;
  layer.top_k = kind.top_k;
  layer.alignment = 4;
  layer.tokens = TokenCount::full;
  layer.routing = kind.routing;
  layer.percent_masked = 5;
  layer.rank_major = kind.rank_major;
  layer.rank_major_compact = kind.rank_major == kExact && kind.routing == RoutingStyle::repeated;
  layer.hidden = layer.combine_hidden = 16;
  layer.dtype = layer.combine_dtype = EPX_BFLOAT16;
  layer.sidecar_bytes = 8;
  test_case.iterations = 1;
  test_case.num_arenas = 1;
  return test_case;
}

void run(const Kind& kind, int num_ranks, const std::string& transport) {
  Workloads workloads(make_case(kind, num_ranks, transport));
  try {
    make_thread_launcher(transport, num_ranks)->each_rank([&](const RankContext& context) {
      run_case(context, workloads);
    });
  } catch (const std::exception& error) {
    fail_check("{}\n  in case {}", describe(error), describe(workloads.test_case()));
  }
}

// One slice from each rank to each, and two, on memory of the rank alone and on memory that peers reach.
void run_slices(int num_ranks, const std::string& transport) {
  const Case test_case = make_case(kKinds[0], num_ranks, transport);
  Rng rng(1);
  std::vector<SliceProblem> problems;
  for (const int per_peer : {1, 2})
    for (const auto direction : {EPX_SLICES_FORWARD, EPX_SLICES_TRANSPOSED})
      problems.emplace_back(random_slices(num_ranks, per_peer, 2, rng), direction, RowShape{EPX_FLOAT32, {5}, 20}, rng);
  make_thread_launcher(transport, num_ranks)->each_rank([&](const RankContext& context) {
    GroupRun group(context, test_case.group);
    group.add_arena(1 << 16);
    Rng local(mix(2, static_cast<uint64_t>(context.rank)));
    for (const SliceProblem& problem : problems)
      run(group, problem, EPX_INT32, Placement::random, local);
  });
}

} // namespace

int main(int argc, char** argv) {
  try {
    int num_ranks = 40;
    std::string transport = "host";
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string name = argv[i];
      const std::string value = argv[i + 1];
      check(name == "--ranks" || name == "--transport", "unknown option {}", name);
      if (name == "--transport")
        transport = value;
      else
        check(std::from_chars(value.data(), value.data() + value.size(), num_ranks).ec == std::errc() && num_ranks >= 1,
              "--ranks is \"{}\", not a number", value);
    }
    for (const Kind& kind : kKinds)
      if (!kind.is_for_ht_path || transport != "host") run(kind, num_ranks, transport);
    run_slices(num_ranks, transport);
    std::printf("%ld checks on %d ranks, none failed\n", num_checks(), num_ranks);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return 1;
  }
}
