// SPDX-License-Identifier: Apache-2.0
// The block runs on groups whose ranks are threads: with EPX_COMBINE_EXACT it has the bits of the local block that has all the
// ranks' tokens and experts.
#include <exception>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include "epx/epx.hpp"
#include "tests/moe/block_cases.h"
#include "tests/moe/block_layer.h"
#include "tests/moe/failing_allocation.h"
#include "tests/moe/row_formats.h"
#include "tests/support/address_sanitizer.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"

namespace epx::test {
namespace {

using Layer = LayerOf<float>;
using RankBlock = RankBlockOf<float>;

Layer make_layer(uint64_t seed, const LayerOptions& options) {
  return make_layer_of<float>(seed, options);
}

void each_rank(const std::vector<int64_t>& split, const epx_group_config& config,
               const std::function<void(const Rank&)>& body) {
  const int num_ranks = static_cast<int>(split.size());
  LocalRendezvous rendezvous(num_ranks);
  run_threads(num_ranks, [&](int rank) {
    const Group group(rendezvous.bootstrap(rank), config);
    body(make_rank(group, split));
  });
}

TEST_CASE("a block on 1, 2, 3 and 4 ranks has the bits of the local one") {
  std::vector<Layer> layers;
  for (const int32_t top_k : {1, 3, kNumExperts}) {
    for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY})
      layers.push_back(make_layer(layers.size(), {top_k, weighting, top_k == 3 ? 4 : 1, top_k == 3 ? 0.1 : 0}));
  }
  for (const auto& split : kSplits) {
    each_rank(split, group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
      for (const Layer& layer : layers)
        RankBlock(rank, layer).run();
      check_status_clean(rank);
    });
  }
}

TEST_CASE("rows that travel in a format have the bits of the local block, and those of tokens that were quantised before") {
  epx_group_config group = group_config(EPX_COMBINE_EXACT);
  group.hidden_dim = 300; // the last block of each scaling is short
  std::vector<Layer> layers;
  for (const epx_row_format& format : wire_formats()) {
    layers.push_back(make_layer(60, {3, EPX_MOE_WEIGHT_LATE, 4, 0.1, false, group.hidden_dim, 9, format}));
    Layer arrived = layers.back();
    arrived.config.dispatch_format.reset();
    arrived.input.tokens = as_they_arrive(format, arrived.input.tokens);
    arrived.run_locally();
    CHECK(difference(layers.back().output.out, arrived.output.out) == "");
    layers.push_back(make_layer(61, {2, EPX_MOE_WEIGHT_EARLY, 1, 0, false, group.hidden_dim, 9, format}));
  }
  for (const auto& split : kSplits) {
    each_rank(split, group, [&](const Rank& rank) {
      for (const Layer& layer : layers)
        RankBlock(rank, layer).run();
      check_status_clean(rank);
    });
  }
}

TEST_CASE("experts in FP8 on 1, 2, 3 and 4 ranks have the bits of the local block") {
  std::vector<Layer> layers;
  for (const epx_moe_recipe recipe : {EPX_MOE_RECIPE_FP8_ACTIVATIONS, EPX_MOE_RECIPE_FP8})
    layers.push_back(make_layer(70, fp8_options(recipe)));
  for (const auto& split : kSplits) {
    each_rank(split, fp8_group_config(group_config(EPX_COMBINE_EXACT)), [&](const Rank& rank) {
      for (const Layer& layer : layers)
        RankBlock(rank, layer).run();
      check_status_clean(rank);
    });
  }
}

TEST_CASE("experts in FP8 are near those that are not") {
  for (const epx_moe_recipe recipe : {EPX_MOE_RECIPE_FP8_ACTIVATIONS, EPX_MOE_RECIPE_FP8}) {
    const Layer fp8 = make_layer(71, fp8_options(recipe));
    Layer wide = fp8;
    wide.config.recipe = EPX_MOE_RECIPE_WIDE;
    wide.run_locally();
    // One product of two operands in E4M3 has an error of 3.8e-2 on Gaussian numbers (relative, of the norm); here are two
    // in a row.
    CHECK(relative_error(fp8.output.out, wide.output.out) <= 8e-2);
    CHECK(relative_error(fp8.gradients.tokens, wide.gradients.tokens) <= 0.12);
    CHECK(relative_error(*fp8.gradients.params.gate_up_weight, *wide.gradients.params.gate_up_weight) <= 0.12);
    CHECK(relative_error(*fp8.gradients.params.down_weight, *wide.gradients.params.down_weight) <= 0.12);
  }
}

TEST_CASE("small gradients of experts in FP8 are not lost") {
  Layer fp8 = make_layer(73, fp8_options(EPX_MOE_RECIPE_FP8));
  for (int64_t i = 0; i < fp8.input.grad_out.count(); ++i)
    fp8.input.grad_out[i] *= 1e-9f; // with the default floor of amax these would be zero
  fp8.run_locally();
  Layer wide = fp8;
  wide.config.recipe = EPX_MOE_RECIPE_WIDE;
  wide.run_locally();
  CHECK(relative_error(fp8.gradients.tokens, wide.gradients.tokens) <= 0.12);
  CHECK(relative_error(*fp8.gradients.params.gate_up_weight, *wide.gradients.params.gate_up_weight) <= 0.12);
  each_rank(kSplits[1], fp8_group_config(group_config(EPX_COMBINE_EXACT)),
            [&](const Rank& rank) { RankBlock(rank, fp8).run(); });
}

TEST_CASE("experts in FP8 keep pre_act or compute it again, and routes beyond an arena's rows are dropped") {
  each_rank(kSplits[2], fp8_group_config(group_config(EPX_COMBINE_EXACT)), [](const Rank& rank) {
    check_recipe<float>(rank, EPX_MOE_RECIPE_FP8, 0);
    const Layer layer = make_layer(72, fp8_options(EPX_MOE_RECIPE_FP8));
    const BlockArena arena(rank.group, layer.config, 1, 1); // 16 rows, which TMA can read
    const moe::BlockConfig config = arena.serve(layer.config);
    const Block<float> block(rank.group, config, rank.num_ranks);
    const auto input = share_of(rank, layer.input);
    const auto params = share_of(rank, layer.params);
    block.forward(input, params);
    block.backward(input, params);
    const epx_group_report report = GroupView(rank.group).status();
    check_equal(report.status, EPX_SUCCESS, "status");
    check(report.event_counts[EPX_EVENT_TOO_FEW_ROWS] > 0, "no route was dropped");
  });
}

TEST_CASE("three layers and two flights are in progress at once") {
  std::vector<Layer> layers;
  for (uint64_t i = 0; i < 3; ++i)
    layers.push_back(make_layer(10 + i, {2, i == 1 ? EPX_MOE_WEIGHT_EARLY : EPX_MOE_WEIGHT_LATE, 8}));
  each_rank(kSplits[2], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    RankBlock first(rank, layers[0]), second(rank, layers[1]), third(rank, layers[2]);
    for (const int32_t flight : {0, 1}) {
      first.forward(flight);
      second.forward(flight);
      third.forward(flight);
    }
    for (const int32_t flight : {1, 0}) {
      third.backward(flight);
      second.backward(flight);
      first.backward(flight);
    }
  });
}

TEST_CASE("paths of slices have the bits of the local block, or those of wire precision") {
  for (const auto& split : kSplits) {
    each_rank(split, group_config(EPX_COMBINE_WIRE), [](const Rank& rank) {
      check_paths<float>(rank, 0, 1e-5);
      check_ring_bits<float>(rank, 1e-5);
    });
  }
}

TEST_CASE("wire precision agrees with the local block up to rounding") {
  const Layer late = make_layer(20, {3, EPX_MOE_WEIGHT_LATE, 1});
  const Layer early = make_layer(21, {3, EPX_MOE_WEIGHT_EARLY, 4});
  each_rank(kSplits[3], group_config(EPX_COMBINE_WIRE), [&](const Rank& rank) {
    RankBlock(rank, late).run(1e-5);
    RankBlock(rank, early).run(1e-5);
  });
}

TEST_CASE("sums by node agree with the local block up to rounding") {
  const Layer late = make_layer(22, {3, EPX_MOE_WEIGHT_LATE, 1});
  const Layer early = make_layer(23, {kNumExperts, EPX_MOE_WEIGHT_EARLY, 4});
  epx_group_config config = group_config(EPX_COMBINE_NODE);
  for (const int32_t ranks_per_node : {1, 2}) {
    config.ranks_per_node = ranks_per_node;
    each_rank(kSplits[3], config, [&](const Rank& rank) {
      RankBlock(rank, late).run(1e-5);
      RankBlock(rank, early).run(1e-5);
    });
  }
}

TEST_CASE("blocks that share an arena have the bits of the local ones") {
  each_rank(kSplits[2], group_config(EPX_COMBINE_EXACT), [](const Rank& rank) { check_shared_arena<float>(rank, 0); });
}

TEST_CASE("recomputing has the same bits, and a flight takes less memory") {
  each_rank(kSplits[1], group_config(EPX_COMBINE_EXACT), [](const Rank& rank) { check_recompute<float>(rank, 0); });
}

TEST_CASE("58 blocks are on one arena of four flights") {
  each_rank(kSplits[1], group_config(EPX_COMBINE_EXACT), [](const Rank& rank) { check_many_blocks<float>(rank, 0); });
}

TEST_CASE("routes beyond max_rows are dropped, as those beyond R are") {
  for (const auto& split : {kSplits[0], kSplits[1], kSplits[2]}) {
    LocalRendezvous rendezvous(static_cast<int>(split.size()));
    run_threads(static_cast<int>(split.size()), [&](int rank) {
      const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
      check_max_rows<float>(bootstrap, split, group_config(EPX_COMBINE_EXACT));
    });
  }
}

TEST_CASE("an arena that does not do is refused on all ranks, and the group lives on") {
  each_rank(kSplits[1], group_config(EPX_COMBINE_EXACT), [](const Rank& rank) { check_arena_refusals<float>(rank, 0); });
}

TEST_CASE("a block fits into an arena by four kinds of memory") {
  each_rank(kSplits[1], group_config(EPX_COMBINE_EXACT), [](const Rank& rank) { check_arena_fit<float>(rank, 0); });
}

TEST_CASE("no rank waits for one whose logits have a NaN") {
  constexpr int64_t kBadToken = 4; // it belongs to rank 1 of 3
  const Layer clean = make_layer(30, {});
  Layer layer = clean;
  layer.input.logits(kBadToken, 6) = std::numeric_limits<float>::quiet_NaN();
  layer.run_locally();
  for (int64_t t = 0; t < kNumTokens; ++t) { // the local block leaves the other tokens alone
    if (t == kBadToken) continue;
    REQUIRE(difference(slice_rows(layer.output.out, t, 1), slice_rows(clean.output.out, t, 1)) == "");
    REQUIRE(difference(slice_rows(layer.gradients.tokens, t, 1), slice_rows(clean.gradients.tokens, t, 1)) == "");
  }
  each_rank(kSplits[2], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    RankBlock block(rank, layer);
    block.run();
    const auto expected = rank.rank == 1 ? Tensor<int64_t>({3}, {1, 1, kBadToken}) : Tensor<int64_t>({3}, {0, 0, -1});
    const std::string wrong = difference(block.info(), expected);
    check(wrong.empty(), "info: {}", wrong);
    check_status_clean(rank);
  });
}

TEST_CASE("a block that does not fit its group is refused on all ranks, and the group lives on") {
  using Config = BlockConfig;
  struct Refusal {
    std::function<void(Config&)> spoil;
    std::vector<std::string> words;
  };
  const std::vector<Refusal> table = {
      {[](Config& c) { c.router.num_experts = 6; }, {"num_experts", "6", "7"}},
      {[](Config& c) { c.ffn.hidden_dim = 65; }, {"hidden_dim", "65", "33"}},
      {[](Config& c) { c.router.top_k = 5; }, {"top_k", "5", "max_top_k", "3"}},
      {[](Config& c) { c.alignment = 16; }, {"alignment", "16", "max_alignment", "8"}},
      {[](Config& c) { c.dtype = EPX_FLOAT64; }, {"float64|FLOAT64", "group"}},
  };
  const Layer layer = make_layer(40, {2});
  epx_group_config narrow = group_config(EPX_COMBINE_EXACT);
  narrow.max_top_k = 3;
  each_rank(kSplits[1], narrow, [&](const Rank& rank) {
    for (size_t i = 0; i < table.size(); ++i) {
      Config config = layer.config;
      table[i].spoil(config);
      epx_moe_block block = nullptr;
      const epx_moe_block_config view = config.c_config();
      const std::string fault = not_refused(epx_moe_block_create(rank.group, &view, &block), table[i].words);
      check(fault.empty(), "case {}: {}", i, fault);
      check(block == nullptr, "case {} made a block", i);
    }
    RankBlock(rank, layer).run();
  });

  epx_group_config bfloat16 = group_config(EPX_COMBINE_EXACT);
  bfloat16.max_token_dtype = EPX_BFLOAT16;
  each_rank({kNumTokens}, bfloat16, [&](const Rank& rank) {
    epx_moe_block block = nullptr;
    const epx_moe_block_config view = layer.config.c_config();
    const std::string fault =
        not_refused(epx_moe_block_create(rank.group, &view, &block), {"max_token_dtype", "bfloat16", "float32"});
    check(fault.empty(), "{}", fault);
  });
}

// What a rank passes to epx_moe_block_create, or, where has_arena_config is set, to epx_moe_arena_create.
struct CreationArgs {
  BlockConfig block;
  bool has_arena_config = false;
  int32_t num_flights = 2;
  int64_t max_rows = 0;
};

// Creates, and returns the sentence of the error, or "" after destroying what was created.
std::string create(const Rank& rank, const CreationArgs& args, epx_status& status) {
  const epx_moe_block_config view = args.block.c_config();
  epx_moe_block block = nullptr;
  epx_moe_arena arena = nullptr;
  if (args.has_arena_config) {
    epx_moe_arena_config config;
    require_ok(epx_moe_arena_config_init(&config, sizeof(config)), "epx_moe_arena_config_init");
    config.block = &view;
    config.num_flights = args.num_flights;
    config.max_rows = args.max_rows;
    status = epx_moe_arena_create(rank.group, &config, &arena);
  } else {
    status = epx_moe_block_create(rank.group, &view, &block);
  }
  std::string sentence = status == EPX_SUCCESS ? "" : epx_last_error();
  require_ok(epx_moe_block_destroy(block), "epx_moe_block_destroy");
  require_ok(epx_moe_arena_destroy(arena), "epx_moe_arena_destroy");
  return sentence;
}

TEST_CASE("an option that differs between ranks is named on all ranks, with both values, and the group lives on") {
  struct Difference {
    std::function<void(CreationArgs&)> both, spoil; // on all ranks; then on one of them
    const char* words;                              // %: the rank that has the second value
  };
  const auto nothing = [](CreationArgs&) {};
  const auto on_arena = [](CreationArgs& args) { args.has_arena_config = true; };
  using Args = CreationArgs;
  const std::vector<Difference> table = {
      {nothing, [](Args& a) { a.block.router.num_experts = 9; },
       "block's router.num_experts ?: rank 0 has 7, rank % has 9"},
      {nothing, [](Args& a) { a.block.router.top_k = 99; }, "block's router.top_k ?: rank 0 has 2, rank % has 99"},
      {nothing, [](Args& a) { a.block.router.score = EPX_MOE_SOFTMAX_THEN_TOPK; },
       "block's router.score ?: rank 0 has sigmoid, rank % has softmax_then_topk"},
      {[](Args& a) { a.block.router.score = EPX_MOE_TOPK_THEN_SOFTMAX; },
       [](Args& a) { a.block.router.score = static_cast<epx_moe_score>(5); },
       "block's router.score ?: rank 0 has topk_then_softmax, rank % has 5"},
      {nothing, [](Args& a) { a.block.router.num_groups = 7; }, "block's router.num_groups ?: rank 0 has 1, rank % has 7"},
      {nothing, [](Args& a) { a.block.router.topk_groups = 2; },
       "block's router.topk_groups ?: rank 0 has 1, rank % has 2"},
      {nothing, [](Args& a) { a.block.router.renormalize = 0; },
       "block's router.renormalize ?: rank 0 has 1, rank % has 0"},
      {nothing, [](Args& a) { a.block.router.scaling_factor = 2.5; },
       "block's router.scaling_factor ?: rank 0 has 1, rank % has 2.5"},
      {nothing, [](Args& a) { a.block.router.aux_loss_coeff = 1e-300; },
       "block's router.aux_loss_coeff ?: rank 0 has 0, rank % has 1e-300"},
      {nothing, [](Args& a) { a.block.router.group_score_top_k = 1; },
       "block's router.group_score_top_k ?: rank 0 has 0, rank % has 1"},
      {nothing, [](Args& a) { a.block.ffn.hidden_dim = 32; }, "block's ffn.hidden_dim ?: rank 0 has 33, rank % has 32"},
      {nothing, [](Args& a) { a.block.ffn.ffn_dim = 40; }, "block's ffn.ffn_dim ?: rank 0 has 9, rank % has 40"},
      {nothing, [](Args& a) { a.block.ffn.activation = EPX_MOE_GELU; },
       "block's ffn.activation ?: rank 0 has swiglu, rank % has gelu"},
      {[](Args& a) { a.block.ffn.activation = EPX_MOE_GELU; }, [](Args& a) { a.block.ffn.activation = EPX_MOE_RELU2; },
       "block's ffn.activation ?: rank 0 has gelu, rank % has relu2"},
      {nothing, [](Args& a) { a.block.dtype = EPX_BFLOAT16; }, "block's dtype ?: rank 0 has float32, rank % has bfloat16"},
      {nothing, [](Args& a) { a.block.weighting = EPX_MOE_WEIGHT_EARLY; },
       "block's weighting ?: rank 0 has late, rank % has early"},
      {nothing, [](Args& a) { a.block.alignment = 4; }, "block's alignment ?: rank 0 has 1, rank % has 4"},
      {nothing, [](Args& a) { a.block.max_in_flight = 3; }, "block's max_in_flight ?: rank 0 has 2, rank % has 3"},
      {nothing, [](Args& a) { a.block.dispatch_format = RowFormat(EPX_SCALING_MX).get(); },
       "block's dispatch_format.scaling ?: rank 0 has none, rank % has mx"},
      {[](Args& a) { a.block.dispatch_format = RowFormat(EPX_SCALING_MX).get(); },
       [](Args& a) { a.block.dispatch_format->dtype = EPX_FLOAT8_E5M2; },
       "block's dispatch_format.dtype ?: rank 0 has float8_e4m3, rank % has float8_e5m2"},
      {[](Args& a) { a.block.dispatch_format = RowFormat(EPX_SCALING_BLOCK128).get(); },
       [](Args& a) { a.block.dispatch_format->amax_floor = 0.5F; },
       "block's dispatch_format.amax_floor ?: rank 0 has 0.0001, rank % has 0.5"},
      {on_arena, [](Args& a) { a.block.dispatch_format = RowFormat(EPX_SCALING_NV).get(); },
       "arena's block.dispatch_format.scaling ?: rank 0 has none, rank % has nv"},
      {nothing, [](Args& a) { a.block.recipe = EPX_MOE_RECIPE_FP8; }, "block's recipe ?: rank 0 has wide, rank % has fp8"},
      {on_arena, [](Args& a) { a.num_flights = 4; }, "arena's num_flights ?: rank 0 has 2, rank % has 4"},
      {on_arena, [](Args& a) { a.max_rows = 5; }, "arena's max_rows ?: rank 0 has 0, rank % has 5"},
      {on_arena, [](Args& a) { a.block.weighting = EPX_MOE_WEIGHT_EARLY; },
       "arena's block.weighting ?: rank 0 has late, rank % has early"},
      {on_arena, [](Args& a) { a.block.ffn.ffn_dim = 40; }, "arena's block.ffn.ffn_dim ?: rank 0 has 9, rank % has 40"},
      {on_arena, [](Args& a) { a.block.router.top_k = 1; }, "arena's block.router.top_k ?: rank 0 has 2, rank % has 1"},
  };
  const Layer layer = make_layer(45, {2});
  each_rank(kSplits[2], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    const BlockArena arena(rank.group, layer.config, 2);
    const auto replaced = [](std::string text, const std::string& what, const std::string& by) {
      return text.replace(text.find(what), what.size(), by);
    };
    const auto check_refused = [&](const CreationArgs& args, const std::string& expected) {
      epx_status status = EPX_SUCCESS;
      const std::string function = args.has_arena_config ? "epx_moe_arena_create" : "epx_moe_block_create";
      const std::string sentence = create(rank, args, status);
      check(status == EPX_ERROR_MISMATCH && sentence == function + ": " + expected,
            "expected \"{}\", rank {} has status {} and says \"{}\"", expected, rank.rank, static_cast<int>(status),
            sentence);
    };
    for (size_t i = 0; i < table.size(); ++i) {
      const Difference& difference = table[i];
      const int other = i % 2 == 0 ? 2 : 1;
      CreationArgs args{layer.config};
      difference.both(args);
      if (rank.rank >= other) difference.spoil(args); // rank 2 as rank 1: the first that differs is named
      const std::string words = replaced(difference.words, "?", "differs between ranks");
      check_refused(args, "the " + replaced(words, "%", std::to_string(other)));
      if (args.has_arena_config || contains(words, "max_in_flight")) continue;
      args.block.arena = arena.handle();
      check_refused(args, "the " + replaced(words, "%", std::to_string(other)));
    }
    CreationArgs shared{layer.config};
    if (rank.rank == 1) shared.block.arena = arena.handle();
    check_refused(shared, "the block's arena differs between ranks: rank 0 has NULL, rank 1 has a shared one");
    CreationArgs other_thing{layer.config};
    other_thing.has_arena_config = rank.rank == 2;
    check_refused(other_thing, "ranks create different things: rank 0 a block, rank 2 an arena");

    RankBlock(rank, layer).run();
    RankBlock(rank, layer, arena.serve(layer.config)).run();
    check_status_clean(rank);
  });
}

TEST_CASE("ranks may differ in what changes nothing for their peers") {
  const Layer layer = make_layer(46, {2});
  each_rank(kSplits[1], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    BlockConfig config = layer.config;
    config.recompute = rank.rank;
    config.alignment = rank.rank; // 0 means 1
    config.max_tokens_per_rank = 3 + rank.rank;
    config.ffn.num_local_experts = rank.rank;
    RankBlock(rank, layer, config).run();
    const BlockArena arena(rank.group, config, 2);
    config = arena.serve(config);
    config.max_in_flight = rank.rank;
    RankBlock(rank, layer, config).run();
    check_status_clean(rank);
  });
}

TEST_CASE("what one rank cannot create fails on all ranks, and the group lives on") {
  const Layer layer = make_layer(47, {2});
  each_rank(kSplits[1], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    for (const bool is_arena : {false, true}) {
      CreationArgs args{layer.config};
      args.has_arena_config = is_arena;
      if (rank.rank == 1) args.block.router.reserved[1] = 77;
      epx_status status = EPX_SUCCESS;
      const std::string sentence = create(rank, args, status);
      check(status == EPX_ERROR_INVALID_ARGUMENT, "rank {} has status {}", rank.rank, static_cast<int>(status));
      const std::string words = rank.rank == 1 ? "reserved field of the router's config is 77"
                                               : "rank 1 could not create its " + std::string(is_arena ? "arena" : "block");
      check(contains(sentence, words), "rank {} says \"{}\"", rank.rank, sentence);
    }
    RankBlock(rank, layer).run();
    check_status_clean(rank);
  });
}

TEST_CASE("what has ended the group is what the calls of its block return") {
  const Layer layer = make_layer(50, {2});
  each_rank(kSplits[0], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    const auto check_aborted = [](const std::string& function, const auto& call) {
      try {
        call();
      } catch (const std::exception& failure) {
        const std::string sentence = describe(failure);
        const std::string begin = function + " returned EPX_ERROR_ABORTED: " + function + ": ";
        check(sentence.starts_with(begin) && contains(sentence, "this rank aborted the group"), "{}", sentence);
        return;
      }
      fail_check("{} succeeded", function);
    };
    RankBlock block(rank, layer);
    block.forward(0);
    GroupView(rank.group).abort();
    check_aborted("epx_moe_block_fwd", [&] { block.forward(1); });
    check_aborted("epx_moe_block_bwd", [&] { block.backward(0); });
    check_aborted("epx_moe_block_create", [&] { RankBlock(rank, layer); });
  });
}

// Bytes of the address space that this process uses.
int64_t address_space() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

TEST_CASE("a rank frees its block alone, and the other one goes on with its own") {
  const Layer layer = make_layer(55, {2});
  const epx_moe_block_config config = layer.config.c_config();
  const auto make_block = [&](const Rank& rank) {
    epx_moe_block block = nullptr;
    require_ok(epx_moe_block_create(rank.group, &config, &block), "epx_moe_block_create");
    return block;
  };
  epx_moe_block late[2] = {};
  each_rank(kSplits[1], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
    epx_moe_block_destroy_local(nullptr);
    epx_moe_arena_destroy_local(nullptr);
    late[rank.rank] = make_block(rank);
    epx_moe_block first = make_block(rank);
    if (rank.rank == 0) epx_moe_block_destroy_local(std::exchange(first, nullptr));
    RankBlock(rank, layer).run(); // which is created and destroyed by both
    if (rank.rank == 1) epx_moe_block_destroy_local(first);
    check_status_clean(rank);
  });
  for (epx_moe_block block : late)
    epx_moe_block_destroy_local(block); // the groups have been destroyed
}

TEST_CASE("an arena that is freed after its group leaves nothing") {
  const Layer layer = make_layer(56, {2});
  int64_t bytes = 0, at_first = 0;
  constexpr int kRounds = 6;
  for (int round = 0; round < kRounds; ++round) {
    epx_moe_arena arena = nullptr;
    each_rank(kSplits[0], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
      const epx_moe_block_config block = layer.config.c_config();
      epx_moe_arena_config config;
      require_ok(epx_moe_arena_config_init(&config, sizeof(config)), "epx_moe_arena_config_init");
      config.block = &block;
      config.num_flights = 1000;
      require_ok(epx_moe_arena_create(rank.group, &config, &arena), "epx_moe_arena_create");
      epx_moe_arena_info info = {};
      info.struct_size = sizeof(info);
      require_ok(epx_moe_arena_query(arena, &info), "epx_moe_arena_query");
      bytes = info.total_bytes - info.window_bytes;
    });
    epx_moe_arena_destroy_local(arena);
    if (round == 0) at_first = address_space();
  }
  REQUIRE(bytes > 1 << 20);
#if !EPX_TEST_HAS_ADDRESS_SANITIZER // which keeps freed memory for a while, and finds leaks by itself
  CHECK(address_space() - at_first < bytes);
#endif
}

// Returns when all ranks have called it, or throws after a minute.
void meet(const epx_bootstrap& bootstrap) {
  char message[256] = "";
  const epx_status status = bootstrap.all_gather(bootstrap.context, nullptr, nullptr, 0, 60'000, message, sizeof(message));
  check(status == EPX_SUCCESS, "rank {} waited for the other one: {}", bootstrap.rank, message);
}

// Makes a call on both ranks, with one of rank 1's allocations failing. Neither waits until the timeout for the other.
// Returns whether there was such an allocation; rank 0 may have made its part of the call before.
template <typename Call>
bool fail_allocation(const Rank& rank, int64_t number, const Call& call) {
  if (rank.rank == 0) {
    const epx_status status = call();
    check(status == EPX_SUCCESS || status == EPX_ERROR_ABORTED, "allocation {}: rank 0 has status {}: {}", number,
          static_cast<int>(status), epx_last_error());
    return status != EPX_SUCCESS;
  }
  const FailingAllocation failing(number);
  const epx_status status = call();
  const epx_status expected = failing.has_failed() ? EPX_ERROR_OUT_OF_MEMORY : EPX_SUCCESS;
  check(status == expected, "allocation {}: rank 1 has status {}: {}", number, static_cast<int>(status), epx_last_error());
  return failing.has_failed();
}

TEST_CASE("a rank that runs out of memory within a call ends the group, so that no rank waits for it") {
  const Layer layer = make_layer(60, {3, EPX_MOE_WEIGHT_LATE, 4, 0.1});
  for (const bool is_backward : {false, true}) {
    bool has_failed[2] = {};
    int64_t number = 0;
    do {
      LocalRendezvous rendezvous(2);
      each_rank(kSplits[1], group_config(EPX_COMBINE_EXACT), [&](const Rank& rank) {
        const RankBlock run(rank, layer);
        const auto output = run.block().make_output(rank.num_tokens);
        const auto gradients = run.block().make_gradients(rank.num_tokens, run.params());
        Block<float>::Forward forward;
        Block<float>::Backward backward;
        run.block().make_call(forward, run.input(), run.params(), 0, output);
        run.block().make_call(backward, run.input(), run.params(), 0, gradients);
        if (is_backward) run.block().run(forward);
        // Rank 1 has finished its part of the forward pass when its peer may still wait in the last combine, which an abort
        // ends.
        meet(rendezvous.bootstrap(rank.rank));
        has_failed[rank.rank] = fail_allocation(rank, number, [&] {
          return is_backward ? epx_moe_block_bwd(run.block().handle(), &backward.args)
                             : epx_moe_block_fwd(run.block().handle(), &forward.args);
        });
      });
      ++number;
    } while (has_failed[1]);
    CHECK_FALSE(has_failed[0]);
    CHECK(number > 1);
  }
}

} // namespace
} // namespace epx::test
