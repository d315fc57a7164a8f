// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/traffic.h"

#include <algorithm>
#include <array>

namespace epx::bench {
namespace {

bool is_scatter(epx_operation operation) {
  return operation == EPX_OP_DISPATCH || operation == EPX_OP_COMBINE_BWD;
}

} // namespace

Traffic& Traffic::operator+=(const Traffic& other) {
  tokens += other.tokens;
  routes += other.routes;
  remote_routes += other.remote_routes;
  pairs += other.pairs;
  remote_pairs += other.remote_pairs;
  return *this;
}

Traffic count_traffic(std::span<const int64_t> topk_idx, std::span<const int32_t> slot, int top_k,
                      std::span<const int32_t> first_experts, int rank) {
  Traffic traffic;
  traffic.tokens = static_cast<int64_t>(slot.size()) / top_k;
  std::array<int64_t, 64> owners{}; // owner of each of one token's routes
  for (int64_t token = 0; token < traffic.tokens; ++token) {
    auto end = owners.begin();
    for (int64_t route = token * top_k; route < (token + 1) * top_k; ++route) {
      if (slot[route] < 0) continue;
      // The first expert of a rank without experts is no other rank's, since it is the number after the last expert.
      const auto next = std::ranges::upper_bound(first_experts, topk_idx[route]);
      *end++ = next - first_experts.begin() - 1;
    }
    traffic.routes += end - owners.begin();
    traffic.remote_routes += std::count_if(owners.begin(), end, [=](int64_t owner) { return owner != rank; });
    std::sort(owners.begin(), end);
    end = std::unique(owners.begin(), end);
    traffic.pairs += end - owners.begin();
    traffic.remote_pairs += std::count_if(owners.begin(), end, [=](int64_t owner) { return owner != rank; });
  }
  return traffic;
}

int64_t logical_rows(epx_operation operation, const Traffic& all) {
  return operation == EPX_OP_PREPARE ? 0 : all.routes;
}

int64_t written_rows(epx_operation operation, const Traffic& all, epx_combine_precision precision) {
  if (operation == EPX_OP_PREPARE) return 0;
  if (is_scatter(operation)) return all.routes;
  return (precision == EPX_COMBINE_EXACT ? all.routes : all.pairs) + all.tokens;
}

int64_t wire_rows(epx_operation operation, const Traffic& all, epx_combine_precision precision) {
  if (operation == EPX_OP_PREPARE) return 0;
  return !is_scatter(operation) && precision == EPX_COMBINE_EXACT ? all.remote_routes : all.remote_pairs;
}

double dropped_routes(const Survey& survey, int top_k) {
  double dropped = 0;
  for (const Traffic& traffic : survey.sets)
    dropped += static_cast<double>(traffic.tokens * top_k - traffic.routes);
  return dropped / static_cast<double>(survey.sets.size());
}

Survey survey(Exchange& exchange, std::span<const InputSet> sets, int top_k, const Peers& peers) {
  const std::vector<int32_t> first_experts = peers.gather(exchange.info().first_local_expert);
  Survey result;
  for (const InputSet& set : sets) {
    PrepareOutputs prepared;
    peers.together([&] {
      const TokenTensors inputs = exchange.tensors_of(set.by_token);
      exchange.prepare_fully(inputs);
      exchange.finish();
      prepared = exchange.prepared();
    });
    const Traffic mine = count_traffic(set.by_token.topk_idx, prepared.slot, top_k, first_experts, peers.rank());
    Traffic all;
    for (const Traffic& traffic : peers.gather(mine))
      all += traffic;
    result.sets.push_back(all);
    for (int64_t rows : peers.gather(prepared.offsets.back()))
      result.max_rows = std::max(result.max_rows, rows);
  }
  return result;
}

} // namespace epx::bench
