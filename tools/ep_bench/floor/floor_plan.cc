// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/floor/floor_plan.h"

#include <algorithm>

namespace epx::bench {
namespace {

// Returns [P], the number of slots that one token has on each rank.
std::vector<int32_t> slots_by_rank(const RoutingOfAll& routing, int source, int64_t token) {
  std::vector<int32_t> slots(routing.topk_idx.size());
  for (int k = 0; k < routing.top_k; ++k)
    ++slots[routing.owner(routing.topk_idx[source][token * routing.top_k + k])];
  return slots;
}

// The formulas of local_bytes() are made of these counts.
struct Counts {
  int64_t arrived = 0;
  int64_t arrived_for_several_slots = 0;
  int64_t sent_pairs = 0;
  int64_t sent_routes = 0;
  int64_t slots = 0;
  int64_t rows_in_use = 0;
};

Counts count(const RoutingOfAll& routing, int rank) {
  Counts counts;
  for (int source = 0; source < routing.num_ranks(); ++source)
    for (int64_t token = 0; token < routing.tokens(); ++token) {
      const std::vector<int32_t> slots = slots_by_rank(routing, source, token);
      counts.slots += is_rank_major(routing.layout) ? std::min(slots[rank], 1) : slots[rank];
      if (source != rank) {
        counts.arrived += slots[rank] > 0 ? 1 : 0;
        counts.arrived_for_several_slots += slots[rank] > 1 ? 1 : 0;
        continue;
      }
      for (int other = 0; other < routing.num_ranks(); ++other) {
        if (other == rank) continue;
        counts.sent_pairs += slots[other] > 0 ? 1 : 0;
        counts.sent_routes += slots[other];
      }
    }
  std::vector<int64_t> demand(routing.num_experts);
  for (const std::vector<int64_t>& topk_idx : routing.topk_idx)
    for (int64_t expert : topk_idx)
      ++demand[expert];
  const int64_t alignment = std::max(routing.alignment, 1);
  for (int32_t expert = 0; expert < routing.num_experts; ++expert)
    if (routing.owner(expert) == rank) counts.rows_in_use += (demand[expert] + alignment - 1) / alignment * alignment;
  return counts;
}

} // namespace

int RoutingOfAll::owner(int64_t expert) const {
  // first_experts of a rank without experts is the number after the last expert.
  return static_cast<int>(std::ranges::upper_bound(first_experts, expert) - first_experts.begin()) - 1;
}

WirePlan scatter_plan(const RoutingOfAll& routing, int rank) {
  WirePlan plan;
  const int num_ranks = routing.num_ranks();
  for (int64_t token = 0; token < routing.tokens(); ++token) {
    const std::vector<int32_t> slots = slots_by_rank(routing, rank, token);
    for (int step = 0; step < num_ranks; ++step) {
      const int to = static_cast<int>((rank + token + step) % num_ranks);
      if (slots[to] > 0) plan.places.push_back({to, static_cast<int32_t>(rank * routing.tokens() + token)});
    }
    plan.first.push_back(static_cast<int32_t>(plan.places.size()));
  }
  return plan;
}

WirePlan gather_plan(const RoutingOfAll& routing, int rank, bool exact) {
  WirePlan plan;
  const int num_ranks = routing.num_ranks();
  const auto store = [&](int home, int64_t row) {
    plan.places.push_back({home, static_cast<int32_t>(row)});
    plan.first.push_back(static_cast<int32_t>(plan.places.size()));
  };
  for (int64_t token = 0; token < routing.tokens(); ++token)
    for (int step = 0; step < num_ranks; ++step) {
      const int home = static_cast<int>((rank + token + step) % num_ranks);
      bool is_stored = false;
      for (int k = 0; k < routing.top_k; ++k) {
        if (routing.owner(routing.topk_idx[home][token * routing.top_k + k]) != rank || (is_stored && !exact)) continue;
        store(home, exact ? token * routing.top_k + k : rank * routing.tokens() + token);
        is_stored = true;
      }
    }
  return plan;
}

int64_t rows_of_places(const RoutingOfAll& routing, bool exact) {
  const int64_t by_pair = routing.num_ranks() * routing.tokens();
  return exact ? std::max(by_pair, routing.tokens() * routing.top_k) : by_pair;
}

LocalBytes local_bytes(const RoutingOfAll& routing, int rank, const Line& line, bool exact, const RowBytes& bytes) {
  const Counts counts = count(routing, rank);
  const int64_t sent = exact ? counts.sent_routes : counts.sent_pairs;
  const int64_t input = routing.tokens() * bytes.input, arrived = counts.arrived * bytes.wire;
  const int64_t slots = counts.slots * bytes.received, rows_in_use = counts.rows_in_use * bytes.received;
  const bool scatters = line.operation == EPX_OP_DISPATCH || line.operation == EPX_OP_COMBINE_BWD;
  const bool is_copied = line.operation == EPX_OP_DISPATCH || is_rank_major(routing.layout);
  if (scatters && is_copied) {
    const int64_t filled = is_rank_major(routing.layout) || !routing.clears_pads ? slots : rows_in_use;
    if (bytes.is_converted_on_landing()) return {input + arrived, arrived + filled};
    return {input + (is_rank_major(routing.layout) ? 0 : counts.arrived_for_several_slots * bytes.received), filled};
  }
  switch (line.operation) {
  case EPX_OP_COMBINE_BWD:
    return {input + arrived + (line.has_weight_gradients ? slots : 0), arrived + rows_in_use};
  case EPX_OP_COMBINE:
  case EPX_OP_DISPATCH_BWD:
    return {slots + sent * bytes.wire, sent * bytes.wire + input};
  default:
    return {};
  }
}

} // namespace epx::bench
