// SPDX-License-Identifier: Apache-2.0
// How many rows an exchange moves, counted from its routing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "epx/epx.h"
#include "tools/ep_bench/exchange.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/workload.h"

namespace epx::bench {

// Of one rank's tokens, or of all ranks' together.
struct Traffic {
  int64_t tokens = 0;
  int64_t routes = 0;        // kept: with a slot
  int64_t remote_routes = 0; // of which to another rank
  int64_t pairs = 0;         // distinct (token, expert rank)
  int64_t remote_pairs = 0;  // of which with another rank

  Traffic& operator+=(const Traffic& other);
};

// Counts one rank's tokens from topk_idx and slot, both [T, K]. `first_experts` [P] has the first expert of each rank,
// ascending.
Traffic count_traffic(std::span<const int64_t> topk_idx, std::span<const int32_t> slot, int top_k,
                      std::span<const int32_t> first_experts, int rank);

// Rows of all ranks together that an operation delivers; must write; must bring to another rank.
int64_t logical_rows(epx_operation operation, const Traffic& all);
int64_t written_rows(epx_operation operation, const Traffic& all, epx_combine_precision precision);
int64_t wire_rows(epx_operation operation, const Traffic& all, epx_combine_precision precision);

// What the input sets of a run move.
struct Survey {
  std::vector<Traffic> sets; // of all ranks together
  int64_t max_rows = 0;      // receive rows that any rank uses in any set, pads too
};

// Routes of all ranks that found no slot, the mean over the sets.
double dropped_routes(const Survey& survey, int top_k);

// Collective: prepares each set once.
Survey survey(Exchange& exchange, std::span<const InputSet> sets, int top_k, const Peers& peers);

} // namespace epx::bench
