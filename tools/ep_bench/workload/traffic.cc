// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/workload/traffic.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tools/ep_bench/floor/rail_plan.h"
#include "tools/ep_bench/row_format.h"

namespace epx::bench {
namespace {

bool is_scatter(epx_operation operation) {
  return operation == EPX_OP_DISPATCH || operation == EPX_OP_COMBINE_BWD;
}

// The first expert of a rank without experts is no other rank's, since it is the number after the last expert.
int64_t owner_of(int64_t expert, std::span<const int32_t> first_experts) {
  return std::ranges::upper_bound(first_experts, expert) - first_experts.begin() - 1;
}

} // namespace

std::vector<int32_t> rank_major_rows(std::span<const int64_t> topk_idx, int top_k, std::span<const int32_t> first_experts,
                                     int64_t max_rows) {
  std::vector<int32_t> rows(topk_idx.size());
  std::vector<int32_t> next(first_experts.size()); // by rank
  for (size_t first = 0; first < topk_idx.size(); first += top_k) {
    std::vector<int32_t> of_token(first_experts.size(), -1); // by rank
    for (size_t route = first; route < first + top_k; ++route) {
      const int64_t owner = owner_of(topk_idx[route], first_experts);
      if (of_token[owner] < 0) of_token[owner] = next[owner]++;
      rows[route] = of_token[owner] < max_rows ? of_token[owner] : -1;
    }
  }
  return rows;
}

Traffic& Traffic::operator+=(const Traffic& other) {
  tokens += other.tokens;
  routes += other.routes;
  remote_routes += other.remote_routes;
  pairs += other.pairs;
  remote_pairs += other.remote_pairs;
  rail_routes += other.rail_routes;
  rail_pairs += other.rail_pairs;
  rail_tokens += other.rail_tokens;
  return *this;
}

Traffic count_traffic(std::span<const int64_t> topk_idx, std::span<const int32_t> slot, int top_k,
                      std::span<const int32_t> first_experts, int rank, int ranks_per_node) {
  const auto is_remote = [=](int64_t owner) { return owner != rank; };
  const auto is_of_other_node = [=](int64_t owner) { return owner / ranks_per_node != rank / ranks_per_node; };
  Traffic traffic;
  traffic.tokens = static_cast<int64_t>(slot.size()) / top_k;
  std::array<int64_t, 64> owners{}; // owner of each of one token's routes
  for (int64_t token = 0; token < traffic.tokens; ++token) {
    auto end = owners.begin();
    for (int64_t route = token * top_k; route < (token + 1) * top_k; ++route) {
      if (slot[route] < 0) continue;
      *end++ = owner_of(topk_idx[route], first_experts);
    }
    traffic.routes += end - owners.begin();
    traffic.remote_routes += std::count_if(owners.begin(), end, is_remote);
    traffic.rail_routes += std::count_if(owners.begin(), end, is_of_other_node);
    std::sort(owners.begin(), end);
    end = std::unique(owners.begin(), end);
    traffic.pairs += end - owners.begin();
    traffic.remote_pairs += std::count_if(owners.begin(), end, is_remote);
    traffic.rail_pairs += std::count_if(owners.begin(), end, is_of_other_node);
    end = std::unique(owners.begin(), end, [=](int64_t a, int64_t b) { return a / ranks_per_node == b / ranks_per_node; });
    traffic.rail_tokens += std::count_if(owners.begin(), end, is_of_other_node);
  }
  return traffic;
}

int64_t logical_rows(epx_operation operation, const Traffic& all, Layout layout) {
  if (operation == EPX_OP_PREPARE) return 0;
  return is_rank_major(layout) ? all.pairs : all.routes;
}

int64_t written_rows(epx_operation operation, const Traffic& all, epx_combine_precision precision, Layout layout) {
  if (operation == EPX_OP_PREPARE) return 0;
  if (is_scatter(operation)) return logical_rows(operation, all, layout);
  return (precision == EPX_COMBINE_EXACT ? all.routes : all.pairs) + all.tokens;
}

int64_t wire_rows(epx_operation operation, const Traffic& all, epx_combine_precision precision) {
  if (operation == EPX_OP_PREPARE) return 0;
  return !is_scatter(operation) && precision == EPX_COMBINE_EXACT ? all.remote_routes : all.remote_pairs;
}

RailBytes rail_bytes(const Line& line, const Traffic& all, const Options& options, int num_ranks, int ranks_per_node) {
  const RailRow row = rail_row(line.operation, options.combine_precision);
  const bool is_fixed = options.graph || options.fixed_rail_tokens > 0;
  const int64_t rails = int64_t{num_ranks} * (num_ranks / ranks_per_node - 1);
  const int64_t tokens_of_rail = options.fixed_rail_tokens > 0 ? options.fixed_rail_tokens : std::max(options.tokens, 1);
  const int64_t tokens = is_fixed ? rails * tokens_of_rail : all.rail_tokens;
  int64_t needed = all.rail_tokens, rows = tokens;
  if (row == RailRow::Pair) {
    needed = all.rail_pairs;
    rows = is_fixed ? tokens * std::min(ranks_per_node, options.top_k) : needed;
  } else if (row == RailRow::Route) {
    needed = all.rail_routes;
    rows = is_fixed ? tokens * options.top_k : needed;
  }
  int64_t weights = 0;
  if (line.operation == EPX_OP_DISPATCH || line.operation == EPX_OP_DISPATCH_BWD) weights = tokens * options.top_k;
  if (line.operation == EPX_OP_COMBINE && row == RailRow::Route) weights = rows;
  const auto bytes = static_cast<double>(row_bytes_of(options, line.operation).wire);
  return {static_cast<double>(needed) * bytes,
          static_cast<double>(rows) * bytes + static_cast<double>(weights) * sizeof(float)};
}

double dropped_routes(const Survey& survey, int top_k) {
  double dropped = 0;
  for (const Traffic& traffic : survey.sets)
    dropped += static_cast<double>(traffic.tokens * top_k - traffic.routes);
  return dropped / static_cast<double>(survey.sets.size());
}

Survey survey(MeasuredGroup& measured, std::span<const InputSet> sets, const Options& options, const Peers& peers) {
  const std::vector<int32_t> first_experts = peers.gather(measured.info().first_local_expert);
  Survey result;
  result.ranks_per_node = measured.info().ranks_per_node;
  for (const InputSet& set : sets) {
    std::vector<int32_t> slot; // [T, K]
    int64_t rows = peers.num_ranks() * options.rows_per_source();
    if (options.is_rank_major())
      slot = rank_major_rows(set.by_token.topk_idx, options.top_k, first_experts, options.rows_per_source());
    else
      peers.together([&] {
        const TokenTensors inputs = measured.tensors_of(set.by_token);
        measured.prepare_fully(inputs);
        measured.finish();
        PrepareOutputs prepared = measured.prepared();
        slot = std::move(prepared.slot);
        rows = prepared.offsets.back();
      });
    const Traffic mine =
        count_traffic(set.by_token.topk_idx, slot, options.top_k, first_experts, peers.rank(), result.ranks_per_node);
    Traffic all;
    for (const Traffic& traffic : peers.gather(mine))
      all += traffic;
    result.sets.push_back(all);
    for (int64_t of_rank : peers.gather(rows))
      result.max_rows = std::max(result.max_rows, of_rank);
  }
  return result;
}

} // namespace epx::bench
