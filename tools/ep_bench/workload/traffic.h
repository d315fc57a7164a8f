// SPDX-License-Identifier: Apache-2.0
// Counts the rows that an exchange moves, from its routing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "epx/epx.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {

// Traffic counts the routes of one rank's tokens, or of all ranks' together.
struct Traffic {
  int64_t tokens = 0;
  int64_t routes = 0;        // kept: with a slot
  int64_t remote_routes = 0; // those of them to another rank
  int64_t pairs = 0;         // distinct (token, expert rank)
  int64_t remote_pairs = 0;  // those of them with another rank
  int64_t rail_routes = 0;   // kept routes to another node
  int64_t rail_pairs = 0;    // distinct (token, expert rank of another node)
  int64_t rail_tokens = 0;   // distinct (token, other node)

  Traffic& operator+=(const Traffic& other);
};

// Returns [T, K]: the row that each route of one rank's tokens has on its rank in the rank-major layout, or -1 where that is at
// or above `max_rows`. Routes of a token to the same rank have the same row.
std::vector<int32_t> rank_major_rows(std::span<const int64_t> topk_idx, int top_k, std::span<const int32_t> first_experts,
                                     int64_t max_rows);

// Counts one rank's tokens from topk_idx and slot, both [T, K]. `first_experts` [P] has the first expert of each rank,
// ascending.
Traffic count_traffic(std::span<const int64_t> topk_idx, std::span<const int32_t> slot, int top_k,
                      std::span<const int32_t> first_experts, int rank, int ranks_per_node);

// Return the rows of all ranks together that an operation delivers, must write, and must bring to another rank.
int64_t logical_rows(epx_operation operation, const Traffic& all, Layout layout = Layout::ExpertMajor);
int64_t written_rows(epx_operation operation, const Traffic& all, epx_combine_precision precision,
                     Layout layout = Layout::ExpertMajor);
int64_t wire_rows(epx_operation operation, const Traffic& all, epx_combine_precision precision);

// RailBytes are what all ranks together send to other nodes in a call on GPUs.
struct RailBytes {
  double needed = 0; // the distinct rows that must cross: see rail_row()
  // Rows and weights, without what a row with a format has between its parts and behind them, up to 45 bytes, and without the
  // records of a few words that tell the peers how many rows there are.
  double sent = 0;
};

// Sizes are exact in calls that are made one by one. In replays of a graph, and with --fixed-rail-tokens, a fixed number of
// tokens travels between each two rail peers. `line` must move rows; `all` has the traffic of all ranks.
RailBytes rail_bytes(const Line& line, const Traffic& all, const Options& options, int num_ranks, int ranks_per_node);

// A Survey is what the input sets of a run move.
struct Survey {
  std::vector<Traffic> sets; // by set, of all ranks together
  int64_t max_rows = 0;      // receive rows that any rank uses in any set, pads too; rank-major: P * M
  int ranks_per_node = 0;    // 0: all
};

// Returns the number of routes of all ranks without a slot, the mean over the sets.
double dropped_routes(const Survey& survey, int top_k);

// Prepares each set once, in the expert-major layout. Collective.
Survey survey(MeasuredGroup& measured, std::span<const InputSet> sets, const Options& options, const Peers& peers);

} // namespace epx::bench
