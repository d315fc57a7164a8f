// SPDX-License-Identifier: Apache-2.0
#include "tests/support/case.h"

#include <algorithm>
#include <cstdlib>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "base/names.h"
#include "runtime/reference/formats.h"
#include "tests/support/rng.h"

namespace epx::test {

namespace {

epx_dtype random_dtype(Rng& rng) {
  return rng.pick({EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16});
}

int random_hidden(Rng& rng) {
  switch (rng.below(10)) {
  case 0:
    return 1;
  case 1:
    return rng.pick({255, 256, 257, 300});
  case 2:
    return rng.pick({8, 16, 64, 128});
  case 3:
    return rng.pick({3, 7, 31, 33, 127});
  case 4:
    return rng.pick({1601, 2060, 3104, 3584, 4097}); // gather splits such rows
  default:
    return static_cast<int>(rng.between(1, 60));
  }
}

int random_experts(int num_ranks, Rng& rng) {
  switch (rng.below(10)) {
  case 0:
    return static_cast<int>(rng.between(1, num_ranks)); // some ranks may own none
  case 1:
    return static_cast<int>(rng.between(20, 64));
  case 2:
    return num_ranks * static_cast<int>(rng.between(1, 4));
  default:
    return static_cast<int>(rng.between(1, 4 * num_ranks + 2));
  }
}

// Returns a capacity that some cases exceed; 0 stands for the worst case.
int64_t random_capacity(const GroupCase& group, const LayerCase& layer, Rng& rng) {
  const int64_t average = static_cast<int64_t>(group.max_tokens) * layer.top_k;
  switch (rng.below(10)) {
  case 0:
    return rng.between(1, std::max(layer.alignment, 1)); // at most one padded zone, often none
  case 1:
    return rng.between(1, 2 * average + 1);
  case 2:
    return average + layer.alignment;
  case 3:
    return 4 * average + 4 * static_cast<int64_t>(layer.alignment);
  default:
    return 0;
  }
}

// With few SMs each warp has many rows to move.
int random_comm_sms(Rng& rng) {
  return rng.pick({0, 0, 1, 2});
}

epx_combine_precision random_precision(Rng& rng) {
  return rng.pick({EPX_COMBINE_WIRE, EPX_COMBINE_EXACT, EPX_COMBINE_NODE});
}

int random_ranks_per_node(int num_ranks, Rng& rng) {
  if (rng.chance(50)) return 0;
  int ranks = static_cast<int>(rng.between(1, num_ranks));
  while (num_ranks % ranks != 0)
    --ranks;
  return ranks;
}

void choose_group(Case& chosen, Rng& rng) {
  GroupCase& group = chosen.group;
  group.num_ranks = rng.pick({1, 2, 2, 3, 3, 4, 4, 6, 7});
  group.ranks_per_node = random_ranks_per_node(group.num_ranks, rng);
  group.num_experts = random_experts(group.num_ranks, rng);
  group.max_tokens = static_cast<int>(rng.chance(15) ? rng.between(20, 40) : rng.between(1, 16));
  group.hidden_dim = random_hidden(rng);
  group.precision = random_precision(rng);
  group.overflow = rng.pick({EPX_OVERFLOW_ERROR, EPX_OVERFLOW_DROP});
}

void choose_routing(Case& chosen, Rng& rng) {
  LayerCase& layer = chosen.layer;
  layer.top_k = static_cast<int>(rng.chance(4) ? rng.pick({32, 64}) : rng.between(1, 8));
  if (layer.top_k > 8) chosen.group.max_tokens = std::min(chosen.group.max_tokens, 6);
  layer.alignment = rng.chance(30) ? static_cast<int>(rng.between(2, 40)) : rng.pick({0, 1, 1, 16, 128});
  layer.tokens = rng.pick({TokenCount::full, TokenCount::ragged, TokenCount::ragged, TokenCount::none_on_one});
  if (rng.chance(2)) layer.tokens = TokenCount::none;
  layer.routing = rng.pick({RoutingStyle::uniform, RoutingStyle::distinct, RoutingStyle::distinct, RoutingStyle::skewed,
                            RoutingStyle::repeated, RoutingStyle::hot});
  layer.percent_masked = rng.pick({0, 0, 10, 50});
  layer.percent_bad = rng.pick({0, 0, 0, 10});
  layer.index_dtype = rng.pick({EPX_INT32, EPX_INT64});
  layer.counts_dtype = rng.pick({EPX_INT32, EPX_INT64});
  layer.rows = rng.pick({RecvRows::exact, RecvRows::exact, RecvRows::more, RecvRows::fewer, RecvRows::any});
}

void choose_tensors(LayerCase& layer, int hidden_dim, Rng& rng) {
  layer.hidden = rng.chance(60) ? hidden_dim : static_cast<int>(rng.between(1, hidden_dim));
  layer.combine_hidden = rng.chance(60) ? layer.hidden : static_cast<int>(rng.between(1, hidden_dim));
  layer.dtype = random_dtype(rng);
  layer.combine_dtype = rng.chance(70) ? layer.dtype : random_dtype(rng);
  layer.sidecar_bytes = rng.pick({0, 0, 1, 3, 16, 33});
  layer.dispatch_weights = rng.chance(70);
  layer.combine_weights = rng.chance(60);
  layer.combine_bwd_weights = rng.chance(60);
  layer.combine_bwd_grads = rng.chance(60);
  layer.dispatch_bwd_grads = rng.chance(70);
  layer.pads_untouched = rng.chance(30);
  layer.rank_major = rng.pick({RankMajorRows::absent, RankMajorRows::absent, RankMajorRows::exact, RankMajorRows::exact,
                               RankMajorRows::max_tokens, RankMajorRows::more, RankMajorRows::fewer, RankMajorRows::none});
}

// Returns a format that rows of H can have in a group with these limits, or none. `alignment` 0: of rank-major rows.
FormatCase random_format(const GroupCase& group, int64_t hidden, int alignment, Rng& rng) {
  FormatCase format;
  format.way = rng.pick(
      {FormatWay::none, FormatWay::none, FormatWay::copied, FormatWay::given, FormatWay::at_source, FormatWay::on_wire});
  format.scaling =
      rng.pick({EPX_SCALING_BLOCK128, EPX_SCALING_BLOCK128_POW2, EPX_SCALING_MX, EPX_SCALING_MX, EPX_SCALING_NV});
  const bool has_floor = format.scaling == EPX_SCALING_BLOCK128 || format.scaling == EPX_SCALING_BLOCK128_POW2;
  format.amax_floor = has_floor ? rng.pick({0.0F, 1e-4F, 1.0F}) : 0.0F;
  if (format.scaling == EPX_SCALING_BLOCK128_POW2) format.scales = rng.pick({EPX_FLOAT32, EPX_FLOAT8_E8M0});
  if (format.scaling == EPX_SCALING_MX) {
    format.dtype = rng.pick({EPX_FLOAT8_E4M3, EPX_FLOAT8_E5M2});
    format.scales = EPX_FLOAT8_E8M0;
  }
  if (format.scaling == EPX_SCALING_NV) {
    format.dtype = EPX_FLOAT4_E2M1;
    format.scales = EPX_FLOAT8_E4M3;
    format.has_encode_scale = rng.chance(30);
  }
  for (epx_scale_layout& layout : format.layouts) {
    layout = rng.pick({EPX_SCALES_ROWS, EPX_SCALES_COLUMNS, EPX_SCALES_PACKED, EPX_SCALES_TILES});
    const bool has_zones_of_tiles = alignment > 0 && alignment % 128 == 0;
    if ((layout == EPX_SCALES_PACKED && format.scales != EPX_FLOAT8_E8M0) ||
        (layout == EPX_SCALES_TILES && (format.scales == EPX_FLOAT32 || !has_zones_of_tiles)))
      layout = EPX_SCALES_COLUMNS;
  }
  const bool is_odd = format.dtype == EPX_FLOAT4_E2M1 && hidden % 2 != 0;
  return is_odd || !fits(group, format) ? FormatCase{} : format;
}

void choose_formats(LayerCase& layer, const GroupCase& group, Rng& rng) {
  layer.format = random_format(group, layer.hidden, layer.alignment, rng);
  layer.rank_major_format = random_format(group, layer.hidden, 0, rng);
  layer.combine_bwd_format = random_format(group, layer.combine_hidden, layer.alignment, rng);
  layer.combine_rank_major_bwd_format = random_format(group, layer.combine_hidden, 0, rng);
  for (FormatCase* format : {&layer.combine_bwd_format, &layer.combine_rank_major_bwd_format})
    if (format->way == FormatWay::copied) *format = {}; // rows without scales are not computed with
  const FormatCase sums = random_format(group, std::min(layer.hidden, layer.combine_hidden), 0, rng);
  if (sums.way == FormatWay::on_wire && group.precision == EPX_COMBINE_WIRE &&
      (sums.scaling == EPX_SCALING_BLOCK128 || sums.scaling == EPX_SCALING_MX))
    layer.sum_format = sums;
}

// Sets the group's limits to what the layer needs or to more.
void choose_limits(Case& chosen, Rng& rng) {
  GroupCase& group = chosen.group;
  const LayerCase& layer = chosen.layer;
  const bool narrow = layer.dtype != EPX_FLOAT32 && layer.combine_dtype != EPX_FLOAT32;
  group.max_dtype = narrow && rng.chance(60) ? rng.pick({EPX_FLOAT16, EPX_BFLOAT16}) : EPX_FLOAT32;
  group.max_top_k = static_cast<int>(rng.chance(70) ? layer.top_k : std::min<int64_t>(64, layer.top_k + rng.below(4)));
  group.max_alignment = std::max(layer.alignment, 1) + (rng.chance(70) ? 0 : static_cast<int>(rng.below(20)));
  group.max_sidecar_bytes = layer.sidecar_bytes + (rng.chance(70) ? 0 : static_cast<int>(rng.below(20)));
  group.max_recv_rows = random_capacity(group, layer, rng);
  constexpr int64_t kLargestWindow = 8 << 20; // bytes; keeps the many groups of a run cheap
  const int64_t slot_bytes = row_bytes(group.max_dtype, group.hidden_dim) + 16;
  if (group.num_ranks * recv_capacity(group) * slot_bytes > kLargestWindow) {
    group.max_recv_rows = std::max<int64_t>(1, kLargestWindow / (group.num_ranks * slot_bytes));
  }
  group.num_comm_sms = random_comm_sms(rng);
}

} // namespace

epx_group_config make_config(const GroupCase& group) {
  epx_group_config config = {};
  epx_group_config_init(&config);
  config.num_experts = group.num_experts;
  config.max_tokens_per_rank = group.max_tokens;
  config.hidden_dim = group.hidden_dim;
  config.max_top_k = group.max_top_k;
  config.max_alignment = group.max_alignment;
  config.max_recv_tokens_per_rank = group.max_recv_rows;
  config.max_sidecar_bytes = group.max_sidecar_bytes;
  config.max_token_dtype = group.max_dtype;
  config.combine_precision = group.precision;
  config.overflow = group.overflow;
  config.transport = group.transport;
  config.num_comm_sms = group.num_comm_sms == 1 && num_nodes(group) > 1 ? 2 : group.num_comm_sms;
  config.timeout_ms = group.timeout_ms;
  config.ranks_per_node = ranks_per_node(group);
  config.fixed_rail_tokens = group.fixed_rail_tokens;
  return config;
}

int64_t recv_capacity(const GroupCase& group) {
  if (group.max_recv_rows != 0) return group.max_recv_rows;
  const int64_t routes = static_cast<int64_t>(group.num_ranks) * group.max_tokens * group.max_top_k;
  const int64_t experts = (group.num_experts + group.num_ranks - 1) / group.num_ranks;
  const int64_t rows = routes + experts * (group.max_alignment - 1);
  return (rows + group.max_alignment - 1) / group.max_alignment * group.max_alignment;
}

int ranks_per_node(const GroupCase& group) {
  if (group.ranks_per_node != 0) return group.ranks_per_node;
  const char* const launched = std::getenv("EPX_TEST_RANKS_PER_NODE");
  return launched == nullptr ? 0 : std::atoi(launched);
}

int num_nodes(const GroupCase& group) {
  const int ranks = ranks_per_node(group);
  return ranks == 0 ? 1 : group.num_ranks / ranks;
}

int64_t random_zone_stride(const GroupCase& group, int alignment, Rng& rng) {
  const int64_t unit = std::max(alignment, 1);
  const int64_t zones = (group.num_experts + group.num_ranks - 1) / group.num_ranks;
  const int64_t most = recv_capacity(group) / zones / unit;
  return most > 0 && rng.chance(25) ? unit * rng.between(1, std::min<int64_t>(most, rng.pick({2, 8, 64}))) : 0;
}

Case random_case(uint64_t seed) {
  Rng rng(mix(seed, 0xca5e));
  Case chosen;
  chosen.seed = seed;
  choose_group(chosen, rng);
  choose_routing(chosen, rng);
  choose_tensors(chosen.layer, chosen.group.hidden_dim, rng);
  if (num_nodes(chosen.group) > 1) chosen.layer.rank_major = RankMajorRows::absent; // refused there
  choose_limits(chosen, rng);
  choose_formats(chosen.layer, chosen.group, rng);
  chosen.layer.zone_stride = random_zone_stride(chosen.group, chosen.layer.alignment, rng);
  chosen.iterations = static_cast<int>(rng.between(1, 2));
  chosen.placement = rng.pick({Placement::plain, Placement::in_place, Placement::random, Placement::random});
  chosen.num_arenas = chosen.placement == Placement::plain ? 0 : static_cast<int>(rng.between(1, 2));
  chosen.arena_bytes = rng.pick({1 << 14, 1 << 16, 1 << 18});
  chosen.layer.rank_major_compact = rng.chance(50);
  return chosen;
}

GroupCase random_group(uint64_t seed, int num_ranks) {
  Rng rng(mix(seed, 0x6409));
  GroupCase group;
  group.num_ranks = num_ranks;
  group.num_experts = random_experts(num_ranks, rng);
  group.max_tokens = static_cast<int>(rng.between(1, 40));
  group.hidden_dim = random_hidden(rng);
  group.precision = random_precision(rng);
  group.overflow = rng.pick({EPX_OVERFLOW_ERROR, EPX_OVERFLOW_DROP});
  group.max_top_k = rng.pick({4, 8, 8, 64});
  group.max_alignment = rng.pick({1, 16, 128});
  group.max_sidecar_bytes = rng.pick({0, 16, 33});
  group.max_dtype = rng.pick({EPX_FLOAT32, EPX_FLOAT32, EPX_BFLOAT16, EPX_FLOAT16});
  group.max_recv_rows = rng.chance(50) ? 0 : rng.between(1, 4 * int64_t{group.max_tokens} * group.max_top_k);
  group.num_comm_sms = random_comm_sms(rng);
  return group;
}

LayerCase random_layer(const GroupCase& group, uint64_t seed) {
  Rng rng(mix(seed, 0x1a7e));
  Case chosen;
  choose_routing(chosen, rng);
  choose_tensors(chosen.layer, group.hidden_dim, rng);
  LayerCase& layer = chosen.layer;
  layer.top_k = std::min(layer.top_k, group.max_top_k);
  layer.alignment = std::min(layer.alignment, group.max_alignment);
  layer.sidecar_bytes = std::min(layer.sidecar_bytes, group.max_sidecar_bytes);
  if (group.max_dtype != EPX_FLOAT32) {
    layer.dtype = rng.pick({EPX_FLOAT16, EPX_BFLOAT16});
    layer.combine_dtype = rng.pick({EPX_FLOAT16, EPX_BFLOAT16});
  }
  choose_formats(layer, group, rng);
  layer.zone_stride = random_zone_stride(group, layer.alignment, rng);
  layer.rank_major_compact = rng.chance(50);
  return layer;
}

bool fits(const GroupCase& group, const FormatCase& format) {
  const int64_t wide = row_bytes(group.max_dtype, group.hidden_dim);
  if (!format.is_quantised()) return row_bytes(format.token_dtype(group.max_dtype), group.hidden_dim) <= wide;
  // Elements, the row's scale and the others, each at a multiple of 16 bytes.
  const int64_t elements = (row_bytes(format.dtype, group.hidden_dim) + 15) / 16 * 16;
  const int64_t row_scale = format.scaling == EPX_SCALING_NV ? 16 : 0;
  const int64_t num_scales = reference::num_scales(format.scaling, group.hidden_dim);
  return elements + row_scale + row_bytes(format.scales, num_scales) <= wide;
}

namespace {

std::string describe_format(const FormatCase& format) {
  constexpr const char* kWays[] = {"none", "copied", "given", "at-source", "on-wire"};
  return fmt::format("{}/{}/{}/{}/floor:{:g}/layouts:{},{}/encode:{}", kWays[static_cast<int>(format.way)],
                     name_of(format.scaling), name_of(format.dtype), name_of(format.scales), format.amax_floor,
                     static_cast<int>(format.layouts[0]), static_cast<int>(format.layouts[1]), format.has_encode_scale);
}

} // namespace

std::string describe(const Case& c) {
  const GroupCase& g = c.group;
  const LayerCase& l = c.layer;
  const auto name = [](epx_dtype dtype) {
    constexpr const char* kNames[] = {"unset", "fp32", "fp16", "bf16", "int32", "int64"};
    return kNames[dtype];
  };
  constexpr const char* kPrecision[] = {"wire", "exact", "node"};
  constexpr const char* kTokens[] = {"full", "ragged", "none-on-one", "none"};
  constexpr const char* kRouting[] = {"uniform", "distinct", "hot", "skewed", "repeated"};
  constexpr const char* kRows[] = {"exact", "more", "fewer", "any"};
  constexpr const char* kRankMajor[] = {"absent", "exact", "max-tokens", "more", "fewer", "none"};
  constexpr const char* kPlacement[] = {"plain", "in-place", "random"};
  return fmt::format(
      "seed={} P={} nodes={} E={} max_tokens={} T={} hidden_dim={} H={}/{} K={}/{} alignment={}/{} zone-stride={} R={}{} "
      "N={} "
      "dtype={}/{}/max:{} index={} counts={} sidecar={}/{} routing={} masked={}% bad={}% precision={} "
      "overflow={} sms={} weights=dispatch:{},combine:{},combine_bwd:{}+grads:{},dispatch_bwd:{} pads={} "
      "format={} M={}{} rank-major-format={} combine-bwd-format={} combine-rank-major-bwd-format={} sum-format={} "
      "iterations={} "
      "placement={} arenas={}x{}",
      c.seed, g.num_ranks, num_nodes(g), g.num_experts, g.max_tokens, kTokens[static_cast<int>(l.tokens)], g.hidden_dim,
      l.hidden, l.combine_hidden, l.top_k, g.max_top_k, l.alignment, g.max_alignment, l.zone_stride, recv_capacity(g),
      g.max_recv_rows == 0 ? "(worst case)" : "", kRows[static_cast<int>(l.rows)], name(l.dtype), name(l.combine_dtype),
      name(g.max_dtype), name(l.index_dtype), name(l.counts_dtype), l.sidecar_bytes, g.max_sidecar_bytes,
      kRouting[static_cast<int>(l.routing)], l.percent_masked, l.percent_bad, kPrecision[g.precision],
      g.overflow == EPX_OVERFLOW_ERROR ? "error" : "drop", g.num_comm_sms, l.dispatch_weights, l.combine_weights,
      l.combine_bwd_weights, l.combine_bwd_grads, l.dispatch_bwd_grads, l.pads_untouched ? "untouched" : "zero",
      describe_format(l.format), kRankMajor[static_cast<int>(l.rank_major)], l.rank_major_compact ? "/compact" : "",
      describe_format(l.rank_major_format), describe_format(l.combine_bwd_format),
      describe_format(l.combine_rank_major_bwd_format), describe_format(l.sum_format), c.iterations,
      kPlacement[static_cast<int>(c.placement)], c.num_arenas, c.arena_bytes);
}

} // namespace epx::test
