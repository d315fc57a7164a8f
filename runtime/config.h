// SPDX-License-Identifier: Apache-2.0
// A group's configuration is validated here, resolved for a number of ranks, and compared between ranks.
#pragma once

#include <cstdint>
#include <span>

#include "epx/epx.h"

namespace epx {

constexpr int kMaxTopK = 64;
constexpr int kMaxRanks = 65535; // an AbortRecord holds a rank in 16 bits

// Every size of a group follows from these dimensions, which are equal on all ranks.
struct GroupShape {
  int num_ranks = 0;           // P
  int ranks_per_node = 0;      // divides P
  int num_experts = 0;         // E
  int max_tokens_per_rank = 0; // tokens
  int hidden_dim = 0;          // elements
  int max_top_k = 0;
  int max_alignment = 0; // rows, >= 1
  int max_sidecar_bytes = 0;
  int64_t max_recv_tokens = 0; // R, rows
  epx_dtype max_token_dtype = EPX_DTYPE_UNSET;
  epx_combine_precision precision = EPX_COMBINE_WIRE;
  int fixed_rail_tokens = 0; // 0: exact sizes where the host can know them

  constexpr int num_nodes() const { return num_ranks / ranks_per_node; }
  constexpr int node_of(int rank) const { return rank / ranks_per_node; }
  // Returns how many tokens of a rank go to each other node at most; those beyond are dropped.
  constexpr int max_rail_tokens() const { return fixed_rail_tokens > 0 ? fixed_rail_tokens : max_tokens_per_rank; }
  // Returns whether sums have a partial of each node (EPX_COMBINE_NODE). On one node they are those of EPX_COMBINE_WIRE.
  constexpr bool sums_by_node() const { return precision == EPX_COMBINE_NODE && ranks_per_node < num_ranks; }
};

// Returns EPX_TIMEOUT_MS of the environment if that is a positive number, else 300,000.
int64_t default_timeout_ms();

// Checks one rank's own config. Throws StatusError with the field and its value.
void validate(const epx_group_config& config);

// Returns the shape of a group of num_ranks ranks, with R and ranks_per_node resolved. `config` is valid. Throws when the sizes
// cannot be represented, and when the ranks do not make whole nodes.
GroupShape resolve(const epx_group_config& config, int num_ranks);

// Throws MISMATCH, naming the field, two ranks and their values, unless all configs agree on what ranks must agree on.
// world_ranks[i] is the rank in the bootstrap that passed configs[i].
void require_agreement(std::span<const epx_group_config> configs, std::span<const int> world_ranks);

} // namespace epx
