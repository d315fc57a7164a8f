// SPDX-License-Identifier: Apache-2.0
#include "tests/support/workload.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/support/values.h"

namespace epx::test {

namespace {

using reference::Matrix;

std::vector<int64_t> token_counts(const GroupCase& group, TokenCount style, Rng& rng) {
  std::vector<int64_t> counts(static_cast<size_t>(group.num_ranks), group.max_tokens);
  if (style == TokenCount::none) std::ranges::fill(counts, 0);
  if (style == TokenCount::mixed)
    for (size_t rank = 0; rank < counts.size(); ++rank)
      if (rank % 3 != 0) counts[rank] = rank % 3 == 1 ? 1 : 0;
  if (style == TokenCount::ragged) {
    for (int64_t& count : counts)
      count = rng.between(0, group.max_tokens);
  }
  if (style == TokenCount::none_on_one) counts[static_cast<size_t>(rng.below(group.num_ranks))] = 0;
  return counts;
}

int64_t bad_index(const LayerCase& layer, int num_experts, Rng& rng) {
  if (layer.index_dtype == EPX_INT64 && rng.chance(60)) { // valid in its low 32 bits only
    return rng.pick({int64_t{1} << 32, (int64_t{1} << 32) + num_experts - 1, (int64_t{1} << 32) - 1,
                     std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()});
  }
  return rng.pick({static_cast<int64_t>(num_experts), int64_t{-2}, int64_t{std::numeric_limits<int32_t>::max()},
                   int64_t{std::numeric_limits<int32_t>::min()}});
}

std::vector<int64_t> route_token(const GroupCase& group, const LayerCase& layer, int hot_expert, Rng& rng) {
  const int num_experts = group.num_experts;
  std::vector<int64_t> experts(static_cast<size_t>(layer.top_k));
  for (int64_t& expert : experts) {
    expert = rng.below(num_experts);
    if (layer.routing == RoutingStyle::hot) expert = hot_expert;
    if (layer.routing == RoutingStyle::skewed) expert = std::min({expert, rng.below(num_experts), rng.below(num_experts)});
  }
  if (layer.routing == RoutingStyle::repeated) { // a few experts, each several times
    for (size_t k = 1; k < experts.size(); ++k) {
      if (rng.chance(60)) experts[k] = experts[static_cast<size_t>(rng.below(static_cast<int64_t>(k)))];
    }
  }
  if (layer.routing == RoutingStyle::distinct && layer.top_k <= num_experts) {
    std::vector<int64_t> all(static_cast<size_t>(num_experts));
    std::iota(all.begin(), all.end(), 0);
    for (size_t k = 0; k < experts.size(); ++k) { // the first steps of a shuffle
      std::swap(all[k], all[k + static_cast<size_t>(rng.below(num_experts - static_cast<int64_t>(k)))]);
      experts[k] = all[k];
    }
  }
  for (int64_t& expert : experts) {
    if (rng.chance(layer.percent_masked)) expert = -1;
    if (rng.chance(layer.percent_bad)) expert = bad_index(layer, num_experts, rng);
  }
  return experts;
}

std::vector<reference::Routing> make_routing(const GroupCase& group, const LayerCase& layer, Rng& rng) {
  std::vector<reference::Routing> ranks;
  const auto hot_expert = static_cast<int>(rng.below(group.num_experts));
  for (const int64_t num_tokens : token_counts(group, layer.tokens, rng)) {
    reference::Routing routing{num_tokens, {}};
    for (int64_t token = 0; token < num_tokens; ++token) {
      const std::vector<int64_t> experts = route_token(group, layer, hot_expert, rng);
      routing.topk_idx.insert(routing.topk_idx.end(), experts.begin(), experts.end());
    }
    ranks.push_back(std::move(routing));
  }
  return ranks;
}

// Returns the rows (N) that each rank passes to one call.
std::vector<int64_t> receive_rows(const reference::Plan& plan, RecvRows style, Rng& rng) {
  std::vector<int64_t> rows;
  const int64_t capacity = plan.problem.max_recv_tokens;
  for (const reference::RankPlan& rank : plan.ranks) {
    const int64_t used = rank.offsets.back();
    RecvRows mine = style;
    if (style == RecvRows::any) mine = rng.pick({RecvRows::exact, RecvRows::more, RecvRows::fewer});
    if (mine == RecvRows::exact) rows.push_back(used);
    if (mine == RecvRows::capacity) rows.push_back(capacity);
    if (mine == RecvRows::fewer) rows.push_back(rng.between(0, used));
    if (mine == RecvRows::more)
      rows.push_back(capacity < 200 && rng.chance(50) ? capacity + rng.below(9) : used + rng.below(9));
  }
  return rows;
}

// Returns one random or scribbled [count, H] matrix per rank.
using MakeRows = Matrix (*)(epx_dtype, int64_t, int64_t, Rng&);
Matrix scribbled(epx_dtype dtype, int64_t rows, int64_t cols, Rng& /*rng*/) {
  return scribbled_rows(dtype, rows, cols);
}

std::vector<Matrix> per_rank(MakeRows make, epx_dtype dtype, const std::vector<int64_t>& counts, int64_t hidden, Rng& rng) {
  std::vector<Matrix> matrices;
  for (const int64_t count : counts)
    matrices.push_back(make(dtype, count, hidden, rng));
  return matrices;
}

std::optional<reference::Format> sum_format(const LayerCase& layer) {
  if (!layer.sum_format.is_quantised()) return std::nullopt;
  return reference_format(layer.sum_format);
}

// Returns the rows that a scatter sends. `dtype` is that of wide ones.
std::vector<Matrix> token_rows(const FormatCase& format, epx_dtype dtype, int64_t hidden,
                               const std::vector<int64_t>& tokens, Rng& rng) {
  const bool is_quantised_here = format.way == FormatWay::at_source || format.way == FormatWay::on_wire;
  return per_rank(is_quantised_here ? random_blocks : random_rows, format.token_dtype(dtype), tokens, hidden, rng);
}

std::optional<reference::FormatTensors> tensors_of(std::optional<FormatData>& format) {
  return format ? std::optional(format->tensors()) : std::nullopt;
}

using MakeWeights = std::vector<float> (*)(int64_t, Rng&);
std::vector<float> scribbled_floats(int64_t count, Rng& /*rng*/) {
  return scribbled_weights(count);
}

std::vector<std::vector<float>> weights_per_rank(bool wanted, MakeWeights make, const std::vector<int64_t>& counts,
                                                 int64_t per_row, Rng& rng) {
  std::vector<std::vector<float>> weights;
  if (!wanted) return weights;
  for (const int64_t count : counts)
    weights.push_back(make(count * per_row, rng));
  return weights;
}

// For calls with a lost rank the oracle uses a plan without that rank's routes, and that rank's outputs stay as they were.
template <typename Outputs>
void keep_untouched(Outputs& outputs, const Outputs& before, LostRank lost) {
  if (lost.rank < 0 || lost.stale || outputs.empty()) return;
  outputs[static_cast<size_t>(lost.rank)] = before[static_cast<size_t>(lost.rank)];
}

void keep_untouched(std::optional<FormatData>& format, const std::optional<FormatData>& before, LostRank lost) {
  if (!format) return;
  keep_untouched(format->recv_scales, before->recv_scales, lost);
  keep_untouched(format->recv_row_scales, before->recv_row_scales, lost);
}

reference::Plan without_rank(reference::Plan plan, LostRank lost) {
  const auto is_cut = [&](int one, int other) {
    if (lost.stale && one == other) return false;
    return one == lost.rank || other == lost.rank;
  };
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    reference::RankPlan& mine = plan.ranks[rank];
    for (size_t slot = 0; slot * 3 < mine.slot_origin.size(); ++slot) {
      const int source = mine.slot_origin[slot * 3];
      if (source >= 0 && is_cut(static_cast<int>(rank), source)) {
        std::fill_n(mine.slot_origin.begin() + static_cast<std::ptrdiff_t>(slot * 3), 3, -2); // such a row is no pad
      }
    }
    for (size_t route = 0; route < mine.slot.size(); ++route) {
      if (is_cut(static_cast<int>(rank), mine.expert_rank[route])) mine.slot[route] = -1;
    }
  }
  return plan;
}

struct Maker {
  const LayerCase& layer;
  const reference::Plan& plan; // the plan that the calls follow
  const reference::Plan& full; // the plan that prepare made
  LostRank lost;
  std::vector<int64_t> tokens; // T of each rank
  Rng rng;

  std::vector<int64_t> rows() { return receive_rows(full, layer.rows, rng); }

  DispatchData dispatch() {
    const std::vector<int64_t> recv = rows();
    DispatchData data;
    data.tokens = token_rows(layer.format, layer.dtype, layer.hidden, tokens, rng);
    data.recv_tokens = per_rank(scribbled, layer.format.recv_dtype(layer.dtype), recv, layer.hidden, rng);
    data.format = make_format_data(layer.format, layer.hidden, tokens, recv, rng);
    data.topk_weights = weights_per_rank(layer.dispatch_weights, random_weights, tokens, layer.top_k, rng);
    data.recv_weights = weights_per_rank(layer.dispatch_weights, scribbled_floats, recv, 1, rng);
    for (size_t rank = 0; layer.sidecar_bytes > 0 && rank < tokens.size(); ++rank) {
      data.sidecars.push_back(random_sidecar(tokens[rank], layer.sidecar_bytes, rng));
      data.recv_sidecars.push_back(scribbled_sidecar(recv[rank], layer.sidecar_bytes));
    }
    const DispatchData before = data;
    const auto formats = tensors_of(data.format);
    reference::dispatch(plan, {data.tokens, data.sidecars, data.topk_weights, data.recv_tokens, data.recv_sidecars,
                               data.recv_weights, layer.pads_untouched, formats ? &*formats : nullptr});
    keep_untouched(data.recv_tokens, before.recv_tokens, lost);
    keep_untouched(data.recv_sidecars, before.recv_sidecars, lost);
    keep_untouched(data.recv_weights, before.recv_weights, lost);
    keep_untouched(data.format, before.format, lost);
    return data;
  }

  CombineData combine() {
    const std::vector<int64_t> recv = rows();
    CombineData data;
    data.expert_out = per_rank(random_rows, layer.combine_dtype, recv, layer.combine_hidden, rng);
    data.recv_weights = weights_per_rank(layer.combine_weights, random_weights, recv, 1, rng);
    data.out = per_rank(scribbled, layer.combine_dtype, tokens, layer.combine_hidden, rng);
    const CombineData before = data;
    const auto format = sum_format(layer);
    reference::combine(plan, {data.expert_out, data.recv_weights, data.out, format ? &*format : nullptr});
    keep_untouched(data.out, before.out, lost);
    return data;
  }

  CombineBwdData combine_bwd() {
    const std::vector<int64_t> recv = rows();
    CombineBwdData data;
    const FormatCase& format = layer.combine_bwd_format;
    data.grad_out = token_rows(format, layer.combine_dtype, layer.combine_hidden, tokens, rng);
    for (size_t rank = 0; layer.combine_bwd_grads && rank < tokens.size(); ++rank) {
      const epx_dtype dtype = !format.is_quantised()                  ? layer.combine_dtype
                              : layer.expert_dtype != EPX_DTYPE_UNSET ? layer.expert_dtype
                                                                      : rng.pick({EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16});
      data.expert_out.push_back(random_rows(dtype, recv[rank], layer.combine_hidden, rng));
    }
    const bool takes_weights =
        !format.is_quantised() || format.way == FormatWay::on_wire || format.scaling == EPX_SCALING_BLOCK128;
    data.recv_weights = weights_per_rank(layer.combine_bwd_weights && takes_weights, random_weights, recv, 1, rng);
    data.grad_expert_out = per_rank(scribbled, format.recv_dtype(layer.combine_dtype), recv, layer.combine_hidden, rng);
    data.format = make_format_data(format, layer.combine_hidden, tokens, recv, rng);
    data.grad_recv_weights = weights_per_rank(layer.combine_bwd_grads, scribbled_floats, recv, 1, rng);
    const CombineBwdData before = data;
    const auto formats = tensors_of(data.format);
    reference::combine_bwd(plan, {data.grad_out, data.expert_out, data.recv_weights, data.grad_expert_out,
                                  data.grad_recv_weights, formats ? &*formats : nullptr});
    keep_untouched(data.format, before.format, lost);
    keep_untouched(data.grad_expert_out, before.grad_expert_out, lost);
    keep_untouched(data.grad_recv_weights, before.grad_recv_weights, lost);
    return data;
  }

  DispatchBwdData dispatch_bwd() {
    const std::vector<int64_t> recv = rows();
    DispatchBwdData data;
    data.grad_recv = per_rank(random_rows, layer.dtype, recv, layer.hidden, rng);
    data.grad_recv_weights = weights_per_rank(layer.dispatch_bwd_grads, random_weights, recv, 1, rng);
    data.grad_tokens = per_rank(scribbled, layer.dtype, tokens, layer.hidden, rng);
    data.grad_topk_weights = weights_per_rank(layer.dispatch_bwd_grads, scribbled_floats, tokens, layer.top_k, rng);
    const DispatchBwdData before = data;
    const auto format = sum_format(layer);
    reference::dispatch_bwd(plan, {data.grad_recv, data.grad_recv_weights, data.grad_tokens, data.grad_topk_weights,
                                   format ? &*format : nullptr});
    keep_untouched(data.grad_tokens, before.grad_tokens, lost);
    keep_untouched(data.grad_topk_weights, before.grad_topk_weights, lost);
    return data;
  }
};

// Returns M. A group whose R is small has staging for few rows.
int64_t rank_major_rows(const GroupCase& group, const LayerCase& layer, const std::vector<reference::Routing>& routing,
                        const reference::Problem& problem, Rng& rng) {
  const reference::RankMajorPlan all = reference::plan_rank_major(problem, routing, group.max_tokens);
  int64_t needed = 0;
  for (const reference::RankMajorRank& source : all.ranks)
    for (const auto& kept : source.kept_to)
      needed = std::max(needed, static_cast<int64_t>(kept.size()));
  int64_t rows = 0;
  if (layer.rank_major == RankMajorRows::exact) rows = needed;
  if (layer.rank_major == RankMajorRows::max_tokens) rows = group.max_tokens;
  if (layer.rank_major == RankMajorRows::more) rows = group.max_tokens + rng.between(1, 5);
  if (layer.rank_major == RankMajorRows::fewer) rows = rng.between(0, std::max<int64_t>(0, needed - 1));
  const int64_t staging = recv_capacity(group) / (static_cast<int64_t>(group.num_ranks) * layer.top_k);
  return staging >= group.max_tokens ? rows : std::min(rows, staging);
}

// In calls with a lost rank the rows between it and the others hold no token: -1 takes its place.
reference::RankMajorPlan without_rank(reference::RankMajorPlan plan, LostRank lost) {
  for (int source = 0; source < static_cast<int>(plan.ranks.size()); ++source)
    for (int receiver = 0; receiver < static_cast<int>(plan.ranks.size()); ++receiver) {
      if (lost.stale && source == receiver) continue;
      if (source == lost.rank || receiver == lost.rank)
        std::ranges::fill(plan.ranks[static_cast<size_t>(source)].kept_to[static_cast<size_t>(receiver)], -1);
    }
  return plan;
}

RankMajorData make_rank_major(const GroupCase& group, const LayerCase& layer,
                              const std::vector<reference::Routing>& routing, LostRank lost, Rng rng) {
  const reference::Problem problem{group.num_experts, layer.top_k, 1, recv_capacity(group), group.precision};
  RankMajorData data;
  data.rows_per_source = rank_major_rows(group, layer, routing, problem, rng);
  data.plan = reference::plan_rank_major(problem, routing, data.rows_per_source, layer.rank_major_compact);
  const reference::RankMajorPlan seen = lost.rank < 0 ? data.plan : without_rank(data.plan, lost);
  std::vector<int64_t> tokens;
  for (const reference::Routing& rank : routing)
    tokens.push_back(rank.num_tokens);
  const std::vector<int64_t> rows(tokens.size(), group.num_ranks * data.rows_per_source);

  RankMajorData::Dispatch& dispatch = data.dispatch;
  const FormatCase& format = layer.rank_major_format;
  dispatch.tokens = token_rows(format, layer.dtype, layer.hidden, tokens, rng);
  dispatch.recv_tokens = per_rank(scribbled, format.recv_dtype(layer.dtype), rows, layer.hidden, rng);
  dispatch.format = make_format_data(format, layer.hidden, tokens, rows, rng);
  dispatch.topk_weights = weights_per_rank(layer.dispatch_weights, random_weights, tokens, layer.top_k, rng);
  dispatch.recv_weights = weights_per_rank(layer.dispatch_weights, scribbled_floats, rows, layer.top_k, rng);
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    dispatch.recv_topk_idx.emplace_back(static_cast<size_t>(rows[rank] * layer.top_k), kScribbledInteger);
    dispatch.counts.emplace_back(static_cast<size_t>(group.num_ranks), kScribbledInteger);
    if (layer.sidecar_bytes == 0) continue;
    dispatch.sidecars.push_back(random_sidecar(tokens[rank], layer.sidecar_bytes, rng));
    dispatch.recv_sidecars.push_back(scribbled_sidecar(rows[rank], layer.sidecar_bytes));
  }
  const auto formats = tensors_of(dispatch.format);
  reference::dispatch_rank_major(data.plan, {dispatch.tokens, dispatch.sidecars, dispatch.topk_weights,
                                             dispatch.recv_tokens, dispatch.recv_sidecars, dispatch.recv_topk_idx,
                                             dispatch.recv_weights, dispatch.counts, formats ? &*formats : nullptr});

  RankMajorData::CombineBwd& combine_bwd = data.combine_bwd;
  const FormatCase& grad_format = layer.combine_rank_major_bwd_format;
  combine_bwd.grad_out = token_rows(grad_format, layer.combine_dtype, layer.combine_hidden, tokens, rng);
  combine_bwd.grad_expert_out =
      per_rank(scribbled, grad_format.recv_dtype(layer.combine_dtype), rows, layer.combine_hidden, rng);
  combine_bwd.format = make_format_data(grad_format, layer.combine_hidden, tokens, rows, rng);
  const RankMajorData::CombineBwd grads_before = combine_bwd;
  const auto grad_formats = tensors_of(combine_bwd.format);
  reference::combine_rank_major_bwd(seen, combine_bwd.grad_out, combine_bwd.grad_expert_out,
                                    grad_formats ? &*grad_formats : nullptr);
  keep_untouched(combine_bwd.grad_expert_out, grads_before.grad_expert_out, lost);
  keep_untouched(combine_bwd.format, grads_before.format, lost);
  if (group.precision == EPX_COMBINE_EXACT) return data;

  RankMajorData::Combine& combine = data.combine;
  combine.expert_out = per_rank(random_rows, layer.combine_dtype, rows, layer.combine_hidden, rng);
  combine.out = per_rank(scribbled, layer.combine_dtype, tokens, layer.combine_hidden, rng);
  const auto out_before = combine.out;
  const auto sums = sum_format(layer);
  reference::combine_rank_major(seen, combine.expert_out, combine.out, sums ? &*sums : nullptr);
  keep_untouched(combine.out, out_before, lost);

  RankMajorData::DispatchBwd& dispatch_bwd = data.dispatch_bwd;
  dispatch_bwd.grad_recv = per_rank(random_rows, layer.dtype, rows, layer.hidden, rng);
  dispatch_bwd.grad_recv_weights = weights_per_rank(layer.dispatch_bwd_grads, random_weights, rows, layer.top_k, rng);
  dispatch_bwd.grad_tokens = per_rank(scribbled, layer.dtype, tokens, layer.hidden, rng);
  dispatch_bwd.grad_topk_weights = weights_per_rank(layer.dispatch_bwd_grads, scribbled_floats, tokens, layer.top_k, rng);
  const RankMajorData::DispatchBwd before = dispatch_bwd;
  reference::dispatch_rank_major_bwd(seen,
                                     {dispatch_bwd.grad_recv, dispatch_bwd.grad_recv_weights, dispatch_bwd.grad_tokens,
                                      dispatch_bwd.grad_topk_weights, sums ? &*sums : nullptr});
  keep_untouched(dispatch_bwd.grad_tokens, before.grad_tokens, lost);
  keep_untouched(dispatch_bwd.grad_topk_weights, before.grad_topk_weights, lost);
  return data;
}

} // namespace

Workload make_workload(const GroupCase& group, const LayerCase& layer, uint64_t seed, LostRank lost) {
  Workload work;
  work.group = group;
  work.layer = layer;
  Rng rng(mix(seed, 0xda7a));
  work.routing = make_routing(group, layer, rng);
  work.plan = reference::prepare({group.num_experts, layer.top_k, layer.alignment, recv_capacity(group), group.precision,
                                  ranks_per_node(group), layer.zone_stride},
                                 work.routing);

  const reference::Plan seen = lost.rank < 0 ? work.plan : without_rank(work.plan, lost);
  Maker maker{layer, seen, work.plan, lost, {}, rng};
  for (const reference::Routing& routing : work.routing)
    maker.tokens.push_back(routing.num_tokens);
  work.dispatch = maker.dispatch();
  work.combine = maker.combine();
  work.combine_bwd = maker.combine_bwd();
  work.dispatch_bwd = maker.dispatch_bwd();
  if (layer.rank_major != RankMajorRows::absent)
    work.rank_major = make_rank_major(group, layer, work.routing, lost, Rng(mix(seed, 0x4a63)));
  return work;
}

const Workload& Workloads::operator[](int iteration) {
  const std::scoped_lock lock(mutex_);
  std::unique_ptr<Workload>& workload = made_[iteration];
  if (!workload) {
    const uint64_t seed = mix(case_.seed, static_cast<uint64_t>(iteration));
    workload = std::make_unique<Workload>(make_workload(case_.group, case_.layer, seed));
  }
  return *workload;
}

int64_t routes_beyond(const reference::RankPlan& plan, int64_t rows) {
  int64_t routes = 0;
  const auto num_slots = static_cast<int64_t>(plan.slot_origin.size() / 3);
  for (int64_t slot = std::max<int64_t>(rows, 0); slot < num_slots; ++slot) {
    routes += plan.slot_origin[static_cast<size_t>(slot * 3)] >= 0;
  }
  return routes;
}

} // namespace epx::test
