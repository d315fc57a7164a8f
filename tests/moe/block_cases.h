// SPDX-License-Identifier: Apache-2.0
// Cases of the block on groups that are the same on the host and on GPUs. The ranks of a group run each of them together.
// tolerance: how far results may be from those of the local block on the host; 0 means the same bits.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/moe/block_layer.h"

namespace epx::test {

template <typename T>
void check_layer(const Rank& rank, const LayerOptions& options, double tolerance) {
  const LayerOf<T> layer = make_layer_of<T>(100, options);
  RankBlockOf<T>(rank, layer).run(tolerance);
  check_status_clean(rank);
}

// Paths of slices: those of rows have the bits of sums over routes, and the ring those of partial sums.
template <typename T>
void check_paths(const Rank& rank, double tolerance, double ring_tolerance) {
  for (const LayerOptions& options : {LayerOptions{3, EPX_MOE_WEIGHT_EARLY, 4, 0.1}, LayerOptions{1, EPX_MOE_WEIGHT_EARLY},
                                      LayerOptions{kMaxTopK, EPX_MOE_WEIGHT_EARLY, kMaxAlignment}}) {
    const LayerOf<T> layer = make_layer_of<T>(115, options);
    BlockConfig ring = layer.config, ragged = layer.config;
    ring.path = EPX_MOE_PATH_RING;
    ragged.path = EPX_MOE_PATH_RAGGED;
    ring.max_in_flight = ragged.max_in_flight = 2;
    RankBlockOf<T> by_ring(rank, layer, ring), by_rows(rank, layer, ragged);
    for (const int32_t flight : {0, 1}) {
      by_ring.forward(flight, ring_tolerance);
      by_rows.forward(flight, tolerance);
    }
    for (const int32_t flight : {1, 0}) {
      by_ring.backward(flight, ring_tolerance);
      by_rows.backward(flight, tolerance);
    }
  }
  check_status_clean(rank);
}

// The ring has the bits of a group of precision `wire`.
template <typename T>
void check_ring_bits(const Rank& rank, double tolerance) {
  const LayerOf<T> layer = make_layer_of<T>(116, {3, EPX_MOE_WEIGHT_EARLY, 4, 0.1});
  BlockConfig ring = layer.config;
  ring.path = EPX_MOE_PATH_RING;
  RankBlockOf<T> expected(rank, layer), actual(rank, layer, ring);
  const auto out = expected.forward(0, tolerance);
  expect_none("out", difference(actual.forward(0, tolerance).out, out.out));
  const auto gradients = expected.backward(0, tolerance);
  expect_none("gradients", gradient_difference(actual.backward(0, tolerance), gradients));
}

// Blocks of different kinds, and flights of one block, take turns on one arena.
template <typename T>
void check_shared_arena(const Rank& rank, double tolerance) {
  const LayerOf<T> late = make_layer_of<T>(110, {3, EPX_MOE_WEIGHT_LATE, 8});
  const LayerOf<T> early = make_layer_of<T>(111, {2, EPX_MOE_WEIGHT_EARLY, 4});
  BlockConfig largest = late.config;
  largest.router.top_k = kMaxTopK;
  const BlockArena arena(rank.group, largest, 3);
  {
    RankBlockOf<T> first(rank, late, arena.serve(late.config)), second(rank, early, arena.serve(early.config));
    const auto before = first.forward(0, tolerance);
    second.forward(1, tolerance);
    const auto again = first.forward(2, tolerance);
    expect_none("out of another flight", difference(again.out, before.out));
    first.backward(2, tolerance);
    second.backward(1, tolerance);
    second.forward(2, tolerance);
    const auto gradients = first.backward(0, tolerance);
    expect_none("repeated", gradient_difference(first.backward(0, tolerance), gradients)); // may be repeated
    second.backward(2, tolerance);
  }
  check_status_clean(rank);
}

template <typename T>
void check_recompute(const Rank& rank, double tolerance) {
  for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY}) {
    const LayerOf<T> layer = make_layer_of<T>(120, {3, weighting, 4, 0.1});
    BlockConfig config = layer.config;
    config.recompute = 1;
    const BlockArena kept(rank.group, layer.config, 2), computed(rank.group, config, 2);
    check(computed.info().flight_bytes < kept.info().flight_bytes, "a flight takes {} bytes, and {} where pre_act is kept",
          computed.info().flight_bytes, kept.info().flight_bytes);
    RankBlockOf<T> expected(rank, layer, kept.serve(layer.config)), actual(rank, layer, computed.serve(config));
    const auto out = expected.forward(0, tolerance);
    expect_none("out", difference(actual.forward(1, tolerance).out, out.out));
    const auto gradients = expected.backward(0, tolerance);
    expect_none("gradients", gradient_difference(actual.backward(1, tolerance), gradients));
  }
}

// Experts in FP8: the same bits whether pre_act is kept or not, and a flight that takes less memory than a wide one.
template <typename T>
void check_recipe(const Rank& rank, epx_moe_recipe recipe, double tolerance) {
  const LayerOf<T> layer = make_layer_of<T>(160, fp8_options(recipe));
  BlockConfig wide = layer.config, recomputes = layer.config;
  wide.recipe = EPX_MOE_RECIPE_WIDE;
  recomputes.recompute = 1;
  const BlockArena of_wide(rank.group, wide, 1), kept(rank.group, layer.config, 2), computed(rank.group, recomputes, 2);
  check(kept.info().flight_bytes < of_wide.info().flight_bytes, "a flight takes {} bytes, and {} where rows are wide",
        kept.info().flight_bytes, of_wide.info().flight_bytes);
  RankBlockOf<T> expected(rank, layer, kept.serve(layer.config)), actual(rank, layer, computed.serve(recomputes));
  const auto out = expected.forward(1, tolerance);
  expected.forward(0, tolerance);
  expect_none("out", difference(actual.forward(1, tolerance).out, out.out));
  const auto gradients = expected.backward(1, tolerance);
  expect_none("gradients", gradient_difference(actual.backward(1, tolerance), gradients));
  expect_none("of another flight", gradient_difference(expected.backward(0, tolerance), gradients));
  check_status_clean(rank);
}

// 1F1B with four micro-batches in flight, on four of 58 layers.
template <typename T>
void check_many_blocks(const Rank& rank, double tolerance) {
  const LayerOf<T> layer = make_layer_of<T>(130, {2});
  const BlockArena arena(rank.group, layer.config, 4);
  const epx_moe_arena_info info = arena.info();
  check_equal(info.num_flights, 4, "num_flights");
  check_equal(info.max_rows, GroupView(rank.group).query().max_recv_tokens_per_rank, "max_rows");
  check_equal(info.total_bytes, 4 * info.flight_bytes + info.workspace_bytes, "total_bytes");
  check(info.window_bytes > 0 && info.window_bytes < info.total_bytes, "window_bytes is {} of {}", info.window_bytes,
        info.total_bytes);
  std::vector<std::unique_ptr<RankBlockOf<T>>> blocks;
  for (int i = 0; i < 58; ++i)
    blocks.push_back(std::make_unique<RankBlockOf<T>>(rank, layer, arena.serve(layer.config)));
  constexpr int32_t kFlights = 4, kMicroBatches = 6;
  const auto block_of = [&](int32_t micro_batch) { return blocks[static_cast<size_t>(10 * micro_batch)].get(); };
  for (int32_t i = 0; i < kMicroBatches + kFlights; ++i) {
    if (i >= kFlights) block_of(i - kFlights)->backward(i % kFlights, tolerance);
    if (i < kMicroBatches) block_of(i)->forward(i % kFlights, tolerance);
  }
  check_status_clean(rank);
}

// A group whose R is small drops the same routes as an arena with as many rows, in a group with the default R.
template <typename T>
void check_max_rows(const epx_bootstrap& bootstrap, const std::vector<int64_t>& split, const epx_group_config& config) {
  for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY}) {
    const LayerOf<T> layer = make_layer_of<T>(140, {3, weighting});
    int64_t dropped = 0;
    for (const int64_t max_rows : {1, 5, 11}) {
      epx_group_config small_config = config;
      small_config.max_recv_tokens_per_rank = max_rows;
      small_config.overflow = EPX_OVERFLOW_DROP;
      const Group large(bootstrap, config), small(bootstrap, small_config);
      const Rank rank = make_rank(large, split);
      const BlockInput<T> input = share_of(rank, layer.input);
      const FfnParams<T> params = share_of(rank, layer.params);
      const BlockArena arena(large.get(), layer.config, 1, max_rows);
      check_equal(arena.info().max_rows, max_rows, "max_rows");
      const Block<T> block(large.get(), arena.serve(layer.config), rank.num_ranks),
          expected(small.get(), layer.config, rank.num_ranks);
      const auto output = expected.forward(input, params);
      const auto actual = block.forward(input, params);
      expect_none("out", difference(actual.out, output.out));
      expect_none("global_counts", difference(actual.global_counts, output.global_counts));
      const auto gradients = expected.backward(input, params);
      expect_none("gradients", gradient_difference(block.backward(input, params), gradients));
      const epx_group_report report = large.status();
      check(report.status == EPX_SUCCESS, "the group has failed: {}", report.message);
      for (int kind = 0; kind < EPX_MAX_EVENT_KINDS; ++kind)
        check(kind == EPX_EVENT_TOO_FEW_ROWS || report.event_counts[kind] == 0, "{} events of kind {}: {}",
              report.event_counts[kind], kind, report.message);
      dropped += static_cast<int64_t>(report.event_counts[EPX_EVENT_TOO_FEW_ROWS]);
      check(small.status().message[0] == '\0', "the small group says: {}", small.status().message);
    }
    check(dropped > 0, "no route was dropped");
  }
}

// Which blocks fit into an arena for another one, and which of the four kinds of memory they lack else (epx_moe_arena_config).
template <typename T>
void check_arena_fit(const Rank& rank, double tolerance) {
  const LayerOf<T> layer = make_layer_of<T>(145, {3});
  struct Fit {
    std::function<void(BlockConfig&)> of_arena, of_block; // what they change of the layer's config
    std::string lacks;                                    // "": it fits
  };
  const std::string flight_rows = "rows that peers reach for a flight",
                    shared_rows = "rows that peers reach for all flights", flight = "memory for a flight",
                    workspace = "workspace";
  const auto same = [](BlockConfig&) {};
  const auto early = [](BlockConfig& c) { c.weighting = EPX_MOE_WEIGHT_EARLY; };
  const auto recomputes = [](BlockConfig& c) { c.recompute = 1; };
  const auto narrow = [](BlockConfig& c) { c.ffn.hidden_dim = 16; };
  const auto early_and_wider = [](BlockConfig& c) {
    c.weighting = EPX_MOE_WEIGHT_EARLY; // 24 columns in a flight, where 2 * 16 are
    c.ffn.hidden_dim = 24;
  };
  const std::vector<Fit> table = {
      {same, same, ""},
      {same, early, ""},
      {same, narrow, ""},
      {same, [](BlockConfig& c) { c.router.top_k = 1; }, ""},
      {same, [](BlockConfig& c) { c.ffn.ffn_dim = 8; }, ""},
      {same, [](BlockConfig& c) { c.ffn.activation = EPX_MOE_RELU2; }, ""},
      {same, [](BlockConfig& c) { c.router.score = EPX_MOE_SOFTMAX_THEN_TOPK, c.router.aux_loss_coeff = 0.1; }, ""},
      {same, [](BlockConfig& c) { c.alignment = kMaxAlignment; }, ""},
      {early, same, flight_rows},
      {narrow, same, flight_rows},
      {narrow, early_and_wider, shared_rows},
      {same, [](BlockConfig& c) { c.router.top_k = kMaxTopK; }, flight},
      {same, [](BlockConfig& c) { c.ffn.ffn_dim = 500; }, flight},
      {recomputes, same, flight},
      {same, recomputes, workspace},
  };
  for (size_t i = 0; i < table.size(); ++i) {
    BlockConfig of_arena = layer.config, of_block = layer.config;
    table[i].of_arena(of_arena);
    table[i].of_block(of_block);
    const BlockArena arena(rank.group, of_arena, 1);
    const BlockConfig served = arena.serve(of_block);
    const epx_moe_block_config view = served.c_config();
    epx_moe_block block = nullptr;
    const epx_status status = epx_moe_block_create(rank.group, &view, &block);
    const std::string sentence = status == EPX_SUCCESS ? "" : epx_last_error();
    epx_moe_block_destroy(block);
    check_status(status, table[i].lacks.empty() ? EPX_SUCCESS : EPX_ERROR_INVALID_ARGUMENT, "case " + std::to_string(i));
    check(contains(sentence, table[i].lacks), "case {}: \"{}\"", i, sentence);
  }
  const BlockArena arena(rank.group, layer.config, 1);
  RankBlockOf<T>(rank, layer, arena.serve(layer.config)).run(tolerance);
  check_status_clean(rank);
}

template <typename T>
void check_arena_refusals(const Rank& rank, double tolerance) {
  const LayerOf<T> layer = make_layer_of<T>(150, {2});
  const epx_moe_block_config view = layer.config.c_config();
  epx_moe_arena arena = nullptr;
  const auto refused_arena = [&](const std::vector<std::string>& words, const auto& spoil) {
    epx_moe_arena_config config;
    require_ok(epx_moe_arena_config_init(&config, sizeof(config)), "epx_moe_arena_config_init");
    config.block = &view;
    spoil(config);
    expect_none("epx_moe_arena_create", not_refused(epx_moe_arena_create(rank.group, &config, &arena), words));
    check(arena == nullptr, "an arena was made");
  };
  const int64_t capacity = GroupView(rank.group).query().max_recv_tokens_per_rank;
  using Config = epx_moe_arena_config;
  refused_arena({"struct_size", "7"}, [](Config& c) { c.struct_size = 7; });
  refused_arena({"block", "NULL"}, [](Config& c) { c.block = nullptr; });
  refused_arena({"num_flights", "0"}, [](Config& c) { c.num_flights = 0; });
  refused_arena({"max_rows", std::to_string(capacity + 1), std::to_string(capacity)},
                [&](Config& c) { c.max_rows = capacity + 1; });
  refused_arena({"max_rows", "-1"}, [](Config& c) { c.max_rows = -1; });
  refused_arena({"reserved", "3"}, [](Config& c) { c.reserved[2] = 3; });

  const BlockArena small(rank.group, layer.config, 2);
  const auto refused_block = [&](const BlockConfig& config, const std::vector<std::string>& words) {
    const BlockConfig served = small.serve(config);
    const epx_moe_block_config served_view = served.c_config();
    epx_moe_block block = nullptr;
    expect_none("epx_moe_block_create", not_refused(epx_moe_block_create(rank.group, &served_view, &block), words));
    check(block == nullptr, "a block was made");
  };
  BlockConfig larger = layer.config;
  larger.ffn.ffn_dim = 500; // pre_act
  refused_block(larger, {"flight", "bytes"});
  larger = layer.config;
  larger.router.top_k = kMaxTopK; // topk_idx
  refused_block(larger, {"flight", "bytes"});
  BlockConfig narrow = layer.config;
  narrow.ffn.hidden_dim = 8;
  const BlockArena narrow_arena(rank.group, narrow, 1);
  const BlockConfig wide = narrow_arena.serve(layer.config);
  const epx_moe_block_config wide_view = wide.c_config();
  epx_moe_block block = nullptr;
  expect_none("rows",
              not_refused(epx_moe_block_create(rank.group, &wide_view, &block), {"rows that peers reach", "bytes"}));
  {
    const OnHost host;
    BlockConfig local = small.serve(block_config<float>({kNumExperts, 2, kHidden, 9, kNumTokens, EPX_MOE_SWIGLU}));
    const epx_moe_block_config local_view = local.c_config();
    expect_none("another group", not_refused(epx_moe_block_create(nullptr, &local_view, &block), {"arena", "group"}));
  }

  // A flight belongs to the block whose forward has filled it.
  RankBlockOf<T> first(rank, layer, small.serve(layer.config)), second(rank, layer, small.serve(layer.config));
  first.forward(1, tolerance);
  auto gradients = second.block().make_gradients(second.input().tokens.size(0), second.params());
  typename Block<T>::Backward call;
  second.block().make_call(call, second.input(), second.params(), 1, gradients);
  expect_none("another block's flight",
              not_refused(epx_moe_block_bwd(second.block().handle(), &call.args), {"flight 1", "block 1", "block 2"}));
  call.args.flight = 2;
  expect_none("no such flight", not_refused(epx_moe_block_bwd(first.block().handle(), &call.args), {"flight", "2"}));
  call.args.flight = 0;
  expect_none("no forward", not_refused(epx_moe_block_bwd(first.block().handle(), &call.args), {"flight 0", "forward"}));
  first.backward(1, tolerance);
  check_status_clean(rank);
}

} // namespace epx::test
