// SPDX-License-Identifier: Apache-2.0
// In these scenarios the rows of dispatch, prepare_dispatch, combine_bwd and their rank-major forms have a format.
#include <doctest/doctest.h>

#include <algorithm>
#include <span>
#include <vector>

#include "tests/multiprocess/conformance.h"
#include "tests/support/check.h"

namespace epx::test {

namespace {

using Layouts = std::array<epx_scale_layout, 2>; // of even and of odd ranks
constexpr epx_scale_layout kRowwise = EPX_SCALES_ROWS, kColumns = EPX_SCALES_COLUMNS, kPacked = EPX_SCALES_PACKED,
                           kTiles = EPX_SCALES_TILES;
constexpr FormatWay kGiven = FormatWay::given, kAtSource = FormatWay::at_source, kOnWire = FormatWay::on_wire;

constexpr FormatCase copied(epx_dtype dtype) {
  return {.way = FormatWay::copied, .dtype = dtype};
}
constexpr FormatCase block128(FormatWay way, Layouts layouts, float amax_floor = 1e-4F) {
  return {way, EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, amax_floor, layouts, false};
}
constexpr FormatCase pow2(FormatWay way, epx_dtype scales, Layouts layouts, float amax_floor = 1e-4F) {
  return {way, EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, scales, amax_floor, layouts, false};
}
constexpr FormatCase mx(FormatWay way, epx_dtype elements, Layouts layouts) {
  return {way, EPX_SCALING_MX, elements, EPX_FLOAT8_E8M0, 0.0F, layouts, false};
}
constexpr FormatCase nv(FormatWay way, Layouts layouts, bool has_encode_scale = false) {
  return {way, EPX_SCALING_NV, EPX_FLOAT4_E2M1, EPX_FLOAT8_E4M3, 0.0F, layouts, has_encode_scale};
}

// What else a row of the table varies.
struct Beside {
  RecvRows rows = RecvRows::exact;
  bool pads_untouched = false;
  int sidecar_bytes = 0;
  bool weights = true;
  TokenCount tokens = TokenCount::ragged;
  RoutingStyle routing = RoutingStyle::uniform;
  int percent_masked = 0;
  RankMajorRows rank_major = RankMajorRows::exact;
  int top_k = base_case().layer.top_k;
};

struct FormatRow {
  FormatCase format;
  epx_dtype dtype; // of wide rows
  int hidden;
  int alignment;
  Beside beside = {};
};

bool has_sums(epx_scaling scaling) {
  return scaling == EPX_SCALING_BLOCK128 || scaling == EPX_SCALING_MX;
}

LayerCase layer_of(const FormatRow& row) {
  LayerCase layer = base_case().layer;
  layer.format = layer.rank_major_format = row.format;
  for (epx_scale_layout& layout : layer.rank_major_format.layouts)
    if (layout == kTiles) layout = kRowwise; // there are no zones
  if (row.format.way != FormatWay::copied) {
    layer.combine_bwd_format = layer.format;
    layer.combine_rank_major_bwd_format = layer.rank_major_format;
  }
  if (row.format.way == FormatWay::on_wire && has_sums(row.format.scaling)) layer.sum_format = row.format;
  layer.dtype = layer.combine_dtype = row.dtype;
  layer.hidden = layer.combine_hidden = row.hidden;
  layer.combine_bwd_weights = row.beside.weights;
  layer.combine_bwd_grads = row.beside.rows != RecvRows::fewer;
  layer.alignment = row.alignment;
  layer.rows = row.beside.rows;
  layer.pads_untouched = row.beside.pads_untouched;
  layer.sidecar_bytes = row.beside.sidecar_bytes;
  layer.dispatch_weights = row.beside.weights;
  layer.tokens = row.beside.tokens;
  layer.routing = row.beside.routing;
  layer.percent_masked = row.beside.percent_masked;
  layer.rank_major = row.beside.rank_major;
  layer.top_k = row.beside.top_k;
  return layer;
}

// Makes the calls of all rows in one group, so that each follows one of another format.
void run_formats(const GroupCase& group_case, std::span<const FormatRow> rows) {
  std::vector<LayerCase> layers;
  std::vector<Workload> works;
  for (const FormatRow& row : rows) {
    layers.push_back(layer_of(row));
    layers.back().rank_major_compact = layers.size() % 2 == 0;
    works.push_back(make_workload(group_case, layers.back(), 400 + layers.size()));
  }
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, group_case);
    group.add_arena(1 << 20);
    group.add_arena(1 << 16);
    for (size_t i = 0; i < layers.size(); ++i) {
      constexpr Placement kPlacements[] = {Placement::plain, Placement::in_place, Placement::random};
      try {
        LayerRun layer(group, layers[i], kPlacements[i % 3], 500 + i);
        layer.prepare(works[i]);
        layer.dispatch(works[i]);
        layer.prepare_dispatch(works[i]);
        if (rows[i].format.way != FormatWay::copied) layer.combine_bwd(works[i]);
        if (layers[i].sum_format.is_quantised()) {
          layer.combine(works[i]);
          layer.dispatch_bwd(works[i]);
        }
        if (num_nodes(group_case) == 1) {
          layer.dispatch_rank_major(works[i]);
          if (rows[i].format.way != FormatWay::copied) layer.combine_rank_major_bwd(works[i]);
          if (layers[i].sum_format.is_quantised()) {
            layer.combine_rank_major(works[i]);
            layer.dispatch_rank_major_bwd(works[i]);
          }
        }
        group.check_status();
      } catch (const std::exception& error) {
        const Case described{.group = group_case, .layer = layers[i]};
        fail_check("{}\n  in row {}: {}", describe(error), i, describe(described));
      }
    }
  });
}

GroupCase group_of_formats(int hidden_dim, int max_tokens) {
  GroupCase group = base_case().group;
  group.hidden_dim = hidden_dim;
  group.max_tokens = max_tokens;
  group.max_alignment = 128;
  group.max_sidecar_bytes = 16;
  return group;
}

} // namespace

TEST_CASE("row formats: each scaling, way and dtype, with its layouts of scales, call after call in one group") {
  constexpr auto kF32 = EPX_FLOAT32, kF16 = EPX_FLOAT16, kBf16 = EPX_BFLOAT16;
  constexpr auto kE4M3 = EPX_FLOAT8_E4M3, kE5M2 = EPX_FLOAT8_E5M2, kE2M1 = EPX_FLOAT4_E2M1, kE8M0 = EPX_FLOAT8_E8M0;
  const FormatRow rows[] = {
      {block128(kAtSource, {kRowwise, kColumns}), kBf16, 2880, 16, {.rows = RecvRows::more}},
      {block128(kAtSource, {kColumns, kColumns}, 0.0F), kF32, 16, 1, {.rows = RecvRows::fewer, .sidecar_bytes = 7}},
      {block128(kAtSource, {kColumns, kRowwise}, 1.0F), kF16, 1, 4, {.pads_untouched = true, .percent_masked = 30}},
      {block128(kGiven, {kColumns, kRowwise}), kBf16, 100, 128, {.rows = RecvRows::any, .pads_untouched = true}},
      {block128(kGiven, {kRowwise, kColumns}), kF32, 2880, 1, {.weights = false, .tokens = TokenCount::none_on_one}},
      {block128(kOnWire, {}), kBf16, 128, 16, {.sidecar_bytes = 16, .routing = RoutingStyle::repeated}},
      {block128(kOnWire, {}, 0.0F), kF16, 100, 4, {.rows = RecvRows::any, .pads_untouched = true}},

      {pow2(kAtSource, kF32, {kColumns, kRowwise}), kF32, 128, 4, {.routing = RoutingStyle::hot}},
      {pow2(kAtSource, kE8M0, {kPacked, kTiles}), kBf16, 2880, 128, {.rows = RecvRows::more}},
      {pow2(kAtSource, kE8M0, {kTiles, kColumns}, 0.0F), kF32, 16, 128, {.pads_untouched = true, .percent_masked = 20}},
      {pow2(kGiven, kF32, {kRowwise, kColumns}), kBf16, 1, 16, {.rows = RecvRows::fewer, .sidecar_bytes = 3}},
      {pow2(kGiven, kE8M0, {kPacked, kRowwise}), kF32, 100, 1, {.rank_major = RankMajorRows::fewer}},
      {pow2(kOnWire, kE8M0, {}, 0.0F), kF16, 1, 16, {.weights = false, .tokens = TokenCount::none_on_one}},
      {pow2(kOnWire, kE8M0, {}), kBf16, 2880, 1, {.rows = RecvRows::fewer}},

      {mx(kAtSource, kE4M3, {kTiles, kTiles}), kBf16, 2880, 128, {.rows = RecvRows::any, .sidecar_bytes = 16}},
      {mx(kAtSource, kE4M3, {kPacked, kColumns}), kF32, 16, 4, {.pads_untouched = true, .tokens = TokenCount::none_on_one}},
      {mx(kAtSource, kE5M2, {kRowwise, kPacked}), kF16, 128, 16, {.routing = RoutingStyle::repeated, .percent_masked = 10}},
      {mx(kAtSource, kE5M2, {kTiles, kPacked}), kF32, 100, 128, {.rows = RecvRows::fewer, .weights = false}},
      {mx(kGiven, kE4M3, {kPacked, kTiles}), kF16, 128, 128, {.pads_untouched = true, .rank_major = RankMajorRows::more}},
      {mx(kGiven, kE5M2, {kColumns, kRowwise}), kBf16, 1, 1, {.rows = RecvRows::more, .routing = RoutingStyle::hot}},
      {mx(kOnWire, kE4M3, {}), kF16, 2880, 4, {.tokens = TokenCount::none_on_one}},
      {mx(kOnWire, kE5M2, {}), kBf16, 1, 16, {.rows = RecvRows::any, .sidecar_bytes = 1}},
      {mx(kOnWire, kE5M2, {}), kF32, 100, 1, {.routing = RoutingStyle::repeated, .rank_major = RankMajorRows::fewer}},

      {nv(kAtSource, {kTiles, kRowwise}), kBf16, 2880, 128, {.rows = RecvRows::fewer}},
      {nv(kAtSource, {kColumns, kTiles}, true),
       kF32,
       100,
       128,
       {.pads_untouched = true, .routing = RoutingStyle::repeated}},
      {nv(kAtSource, {kRowwise, kColumns}), kF16, 2, 4, {.sidecar_bytes = 5, .percent_masked = 40}},
      {nv(kAtSource, {kRowwise, kRowwise}, true), kBf16, 16, 1, {.tokens = TokenCount::none_on_one}},
      {nv(kGiven, {kRowwise, kColumns}), kF32, 128, 16, {.rows = RecvRows::any, .rank_major = RankMajorRows::more}},
      {nv(kGiven, {kTiles, kTiles}), kBf16, 2, 128, {.pads_untouched = true, .weights = false}},
      {nv(kOnWire, {}), kF32, 2880, 16, {.rows = RecvRows::more, .percent_masked = 10}},
      {nv(kOnWire, {}, true), kBf16, 100, 4, {.sidecar_bytes = 16, .routing = RoutingStyle::hot}},
      {nv(kOnWire, {}), kF16, 16, 1, {.rows = RecvRows::fewer}},

      {copied(kE4M3), kBf16, 2880, 16, {.rows = RecvRows::any, .sidecar_bytes = 12}},
      {copied(kE5M2), kF32, 33, 4, {.pads_untouched = true, .routing = RoutingStyle::repeated}},
      {copied(kE2M1), kF16, 18, 1, {.sidecar_bytes = 3, .tokens = TokenCount::none_on_one}},
  };
  run_formats(group_of_formats(2880, 10), rows);
}

TEST_CASE("nodes: row formats, staged and in memory that peers reach, of ranks that know their sizes and of others") {
  const FormatRow rows[] = {
      {block128(kGiven, {kColumns, kRowwise}), EPX_BFLOAT16, 130, 16, {.rows = RecvRows::fewer, .sidecar_bytes = 5}},
      {block128(kAtSource, {kRowwise, kColumns}, 0.0F), EPX_FLOAT32, 129, 4, {.tokens = TokenCount::none_on_one}},
      {block128(kOnWire, {}), EPX_FLOAT16, 33, 1, {.rows = RecvRows::fewer, .percent_masked = 20}},
      {pow2(kAtSource, EPX_FLOAT8_E8M0, {kTiles, kPacked}), EPX_FLOAT16, 144, 128, {.routing = RoutingStyle::hot}},
      {pow2(kOnWire, EPX_FLOAT8_E8M0, {}), EPX_BFLOAT16, 65, 16, {.sidecar_bytes = 3, .routing = RoutingStyle::repeated}},
      {mx(kGiven, EPX_FLOAT8_E5M2, {kPacked, kTiles}), EPX_FLOAT32, 100, 128, {.percent_masked = 10}},
      {mx(kAtSource, EPX_FLOAT8_E4M3, {kColumns, kTiles}), EPX_BFLOAT16, 144, 128, {.pads_untouched = true}},
      {mx(kOnWire, EPX_FLOAT8_E4M3, {}), EPX_FLOAT32, 1, 4, {.tokens = TokenCount::none_on_one}},
      {mx(kOnWire, EPX_FLOAT8_E5M2, {}), EPX_BFLOAT16, 144, 4, {.rows = RecvRows::fewer}},
      {nv(kGiven, {kRowwise, kColumns}), EPX_FLOAT16, 34, 16, {.routing = RoutingStyle::repeated}},
      {nv(kAtSource, {kTiles, kRowwise}, true), EPX_BFLOAT16, 144, 128, {.sidecar_bytes = 16}},
      {nv(kOnWire, {}, true), EPX_FLOAT32, 66, 1, {.rows = RecvRows::any}},
      {copied(EPX_FLOAT8_E4M3), EPX_FLOAT32, 33, 4, {.sidecar_bytes = 12}}};
  for (const bool has_fixed_sizes : {false, true}) {
    GroupCase group = group_of_formats(144, 12);
    if (is_on_host()) group.ranks_per_node = 1;
    if (has_fixed_sizes) group.fixed_rail_tokens = group.max_tokens;
    run_formats(group, rows);
  }
}

TEST_CASE("nodes: row formats in a group that sums by node, or exactly") {
  const FormatRow rows[] = {{block128(kGiven, {kColumns, kRowwise}), EPX_BFLOAT16, 144, 4},
                            {mx(kAtSource, EPX_FLOAT8_E4M3, {kPacked, kRowwise}), EPX_FLOAT32, 144, 1},
                            {nv(kOnWire, {}), EPX_FLOAT16, 144, 16}}; // whose sums have no format
  for (const auto precision : {EPX_COMBINE_NODE, EPX_COMBINE_EXACT}) {
    GroupCase group = group_of_formats(144, 12);
    if (is_on_host()) group.ranks_per_node = 1;
    group.precision = precision;
    run_formats(group, rows);
  }
}

namespace {

void run_on_nodes(std::span<const FormatRow> rows) {
  GroupCase group = group_of_formats(34, 1030);
  if (is_on_host()) group.ranks_per_node = 1;
  run_formats(group, rows);
}

} // namespace

TEST_CASE("nodes: row formats of more tokens than a chunk of the rails has") {
  const FormatRow rows[] = {
      {block128(kAtSource, {kRowwise, kColumns}), EPX_BFLOAT16, 33, 4, {.tokens = TokenCount::mixed}}};
  run_on_nodes(rows);
}

TEST_CASE("nodes: row formats of so many tokens, quantised before and on the wire alone") {
  const FormatRow rows[] = {{nv(kGiven, {kColumns, kRowwise}), EPX_FLOAT32, 34, 1, {.tokens = TokenCount::full}},
                            {mx(kOnWire, EPX_FLOAT8_E4M3, {}), EPX_FLOAT32, 33, 1, {.tokens = TokenCount::full}}};
  run_on_nodes(rows);
}

TEST_CASE("row formats: long rows") {
  const FormatRow rows[] = {{block128(kAtSource, {kColumns, kRowwise}), EPX_BFLOAT16, 7168, 1},
                            {mx(kAtSource, EPX_FLOAT8_E4M3, {kPacked, kTiles}), EPX_BFLOAT16, 7168, 128},
                            {nv(kAtSource, {kTiles, kColumns}), EPX_BFLOAT16, 7168, 128},
                            {nv(kOnWire, {}), EPX_BFLOAT16, 7168, 1},
                            // Some of these are not finite near their end.
                            {block128(kAtSource, {kRowwise, kRowwise}), EPX_FLOAT16, 7168, 1, {.tokens = TokenCount::full}},
                            {mx(kAtSource, EPX_FLOAT8_E5M2, {}), EPX_BFLOAT16, 6144, 1, {.tokens = TokenCount::full}},
                            {mx(kAtSource, EPX_FLOAT8_E4M3, {}), EPX_FLOAT16, 5120, 1, {.tokens = TokenCount::full}},
                            // These have two LL chunks, and E2M1 codes that are no multiple of 16 bytes.
                            {nv(kAtSource, {kRowwise, kColumns}), EPX_BFLOAT16, 2690, 1},
                            {nv(kGiven, {kColumns, kRowwise}), EPX_FLOAT32, 2706, 4},
                            // These have more bytes than the shared memory of a warp.
                            {block128(kAtSource, {kColumns, kRowwise}), EPX_FLOAT32, 7168, 1},
                            {mx(kAtSource, EPX_FLOAT8_E4M3, {kPacked, kTiles}), EPX_BFLOAT16, 7264, 128},
                            {nv(kAtSource, {kTiles, kColumns}), EPX_BFLOAT16, 14368, 128},
                            {nv(kOnWire, {}), EPX_FLOAT32, 3616, 1},
                            {mx(kOnWire, EPX_FLOAT8_E5M2, {}), EPX_FLOAT16, 8192, 1}};
  run_formats(group_of_formats(14368, 2), rows);
}

TEST_CASE("row formats: more bytes than any internal step is likely to move at once") {
  const FormatRow rows[] = {
      {mx(kAtSource, EPX_FLOAT8_E5M2, {kColumns, kTiles}), EPX_FLOAT16, 1496, 128},
      {nv(kOnWire, {}), EPX_BFLOAT16, 1496, 1, {.rows = RecvRows::fewer}},
      {block128(kGiven, {kRowwise, kColumns}), EPX_FLOAT32, 1496, 16, {.pads_untouched = true}},
      // Some ranks have so few tokens that they take the low-latency path, others have many.
      {block128(kAtSource, {kColumns, kRowwise}), EPX_BFLOAT16, 1488, 16, {.tokens = TokenCount::mixed}},
      {nv(kOnWire, {}), EPX_FLOAT32, 1488, 1, {.tokens = TokenCount::mixed}}};
  run_formats(group_of_formats(1496, 200), rows);
}

TEST_CASE("row formats: a group for rows of 8 or 4 bits takes wide tokens, and gives them back") {
  constexpr int kHidden = 192; // a row of it with its scales is the longest that the group takes
  const FormatRow of_e4m3[] = {{block128(kAtSource, {kRowwise, kColumns}), EPX_FLOAT32, kHidden, 4},
                               {block128(kOnWire, {}), EPX_FLOAT32, kHidden, 16},
                               {block128(kGiven, {kColumns, kRowwise}), EPX_FLOAT32, kHidden, 1},
                               {mx(kOnWire, EPX_FLOAT8_E4M3, {}), EPX_BFLOAT16, kHidden, 1},
                               {nv(kAtSource, {kRowwise, kRowwise}), EPX_FLOAT16, kHidden, 1},
                               {copied(EPX_FLOAT8_E4M3), EPX_FLOAT32, kHidden, 1}};
  const FormatRow of_e5m2[] = {{mx(kAtSource, EPX_FLOAT8_E5M2, {kPacked, kRowwise}), EPX_FLOAT32, kHidden, 4},
                               {mx(kOnWire, EPX_FLOAT8_E5M2, {}), EPX_FLOAT32, kHidden, 1}};
  const FormatRow of_e2m1[] = {{nv(kAtSource, {kColumns, kTiles}), EPX_FLOAT32, kHidden, 128},
                               {nv(kGiven, {kRowwise, kColumns}), EPX_FLOAT32, kHidden, 1},
                               {nv(kOnWire, {}, true), EPX_FLOAT32, kHidden, 4},
                               {copied(EPX_FLOAT4_E2M1), EPX_FLOAT32, kHidden, 1}};
  const std::pair<epx_dtype, std::span<const FormatRow>> groups[] = {
      {EPX_FLOAT8_E4M3, of_e4m3}, {EPX_FLOAT8_E5M2, of_e5m2}, {EPX_FLOAT4_E2M1, of_e2m1}};
  for (const auto& [dtype, rows] : groups) {
    GroupCase group = group_of_formats(kHidden, 12);
    group.max_dtype = dtype;
    run_formats(group, rows);
  }
}

TEST_CASE("row formats: longer lists of slots than a warp has lanes") {
  constexpr int kRoutes = 64, kTokens = 130; // more than the low-latency path takes with so many routes
  GroupCase group = group_of_formats(144, kTokens);
  group.num_experts = group.max_top_k = kRoutes;
  const Beside full{.sidecar_bytes = 16, .tokens = TokenCount::full, .top_k = kRoutes};
  const FormatRow rows[] = {{mx(kAtSource, EPX_FLOAT8_E4M3, {kTiles, kPacked}), EPX_BFLOAT16, 144, 128, full},
                            {nv(kAtSource, {kRowwise, kColumns}), EPX_FLOAT32, 144, 4, full}};
  run_formats(group, rows);
}

// On GPUs prepare_dispatch of rows with a format has no low-latency path then.
TEST_CASE("row formats: a group of more than 1024 experts") {
  GroupCase group = group_of_formats(144, 6);
  group.num_experts = 1500; // prepare takes the shared memory in which the other path has its chunks
  const FormatRow rows[] = {{mx(kAtSource, EPX_FLOAT8_E4M3, {kPacked, kRowwise}), EPX_BFLOAT16, 144, 1},
                            {block128(kOnWire, {}), EPX_FLOAT32, 144, 1}};
  run_formats(group, rows);
}

TEST_CASE("row formats: in the slots of a rank without routes, rows and scales become zero") {
  if (launcher().num_ranks() == 1) return; // a rank whose handle memory is wrong writes nothing
  const FormatRow rows[] = {
      {mx(kAtSource, EPX_FLOAT8_E4M3, {kTiles, kPacked}), EPX_BFLOAT16, 144, 128, {.pads_untouched = true}},
      {nv(kGiven, {kRowwise, kColumns}), EPX_BFLOAT16, 144, 16, {.pads_untouched = true}},
      {block128(kOnWire, {}), EPX_FLOAT32, 144, 16, {}}};
  const GroupCase group_case = group_of_formats(144, 12);
  for (const FormatRow& row : rows) {
    for (const bool is_stale : {false, true}) {
      const LayerCase layer_case = layer_of(row);
      const Workload good = make_workload(group_case, layer_case, 601);
      const Workload spoiled = make_workload(group_case, layer_case, 602, {1, is_stale});
      on_every_rank([&](const RankContext& context) {
        GroupRun group(context, group_case);
        LayerRun layer(group, layer_case, Placement::random, 603);
        layer.prepare(spoiled);
        const std::vector<std::byte> earlier = layer.handle();
        if (is_stale) layer.prepare(spoiled);
        if (group.rank() == 1) layer.use_foreign_handle(is_stale ? earlier : std::vector<std::byte>(earlier.size()));
        if (is_stale || group.rank() == 1) layer.expect_mismatch(!is_stale);
        layer.dispatch(spoiled);
        group.check_status();
        if (is_stale || group.rank() == 1) layer.expect_mismatch(!is_stale);
        layer.combine_bwd(spoiled);
        group.check_status();
        if (layer_case.sum_format.is_quantised()) {
          if (is_stale || group.rank() == 1) layer.expect_mismatch(!is_stale);
          layer.combine(spoiled);
          group.check_status();
        }
        layer.prepare_dispatch(good);
        group.check_status();
      });
    }
  }
}

} // namespace epx::test
