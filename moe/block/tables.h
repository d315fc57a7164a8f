// SPDX-License-Identifier: Apache-2.0
// The integers of the exchanges that are made of slices (epx_ragged_all_to_all), for host and device: which slices there are, and
// which route has which expert. Each struct is a loop's body: operator()(i) writes what belongs to index i.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/host_device.h"
#include "runtime/layout/slots.h"

namespace epx::moe {

EPX_HOST_DEVICE inline void add_one(int32_t* count) {
#if defined(__CUDA_ARCH__)
  atomicAdd(count, 1);
#else
  std::atomic_ref(*count).fetch_add(1, std::memory_order_relaxed);
#endif
}

// The four integer arrays of a call, each [slices].
struct SliceArrays {
  int32_t *input_offsets, *send_sizes, *output_offsets, *recv_sizes;

  EPX_HOST_DEVICE void set(int64_t i, int64_t input_offset, int64_t send_size, int64_t output_offset,
                           int64_t recv_size) const {
    input_offsets[i] = static_cast<int32_t>(input_offset);
    send_sizes[i] = static_cast<int32_t>(send_size);
    output_offsets[i] = static_cast<int32_t>(output_offset);
    recv_sizes[i] = static_cast<int32_t>(recv_size);
  }
};

// ---- Ring ----

// What a rank tells all others of its routes: [1 + max_tokens, K], a row with T and then the experts of each token; -1 beyond T.
struct RingRoutes {
  const int32_t* topk_idx; // [T, K]
  int64_t num_tokens, max_tokens, top_k;
  int32_t* told;

  EPX_HOST_DEVICE void operator()(int64_t i) const { // of all elements
    const int64_t route = i - top_k;
    told[i] = route < 0 ? static_cast<int32_t>(num_tokens) : route < num_tokens * top_k ? topk_idx[route] : -1;
  }
};

// The slices by which every rank gets `rows` rows of each other one, in an array by source rank.
struct RingSlices {
  int64_t rows;
  int rank;
  SliceArrays to_all;     // by peer
  int32_t* global_counts; // [P, E]: to be cleared
  int64_t num_experts;

  EPX_HOST_DEVICE void operator()(int64_t i) const { // of the ranks
    to_all.set(i, 0, rows, rank * rows, rows);
    for (int64_t e = 0; e < num_experts; ++e)
      global_counts[i * num_experts + e] = 0;
  }
};

// From what all ranks have told: the routes of all tokens to this rank's experts, how many routes each rank has to each expert,
// and the slices by which rows of T tokens go to all ranks, and those by which each rank's part comes home.
struct GatheredRoutes {
  const int32_t* told; // [P, 1 + max_tokens, K]
  int64_t num_tokens, max_tokens, top_k, num_experts, first_expert, local_experts;
  int rank;
  int32_t* local_idx;     // [P, max_tokens, K]: 0..E_l - 1, or -1
  int32_t* global_counts; // [P, E]
  SliceArrays to_all, home;

  EPX_HOST_DEVICE void operator()(int64_t i) const { // of local_idx
    const int64_t of_rank = max_tokens * top_k;
    const int64_t source = i / of_rank, route = i % of_rank;
    const int32_t* const from = told + source * (of_rank + top_k);
    const int64_t tokens = from[0] < 0 ? 0 : from[0] > max_tokens ? max_tokens : from[0];
    const int32_t expert = route < tokens * top_k ? from[top_k + route] : -1;
    const bool is_expert = expert >= 0 && expert < num_experts;
    const int64_t local = expert - first_expert;
    local_idx[i] = is_expert && local >= 0 && local < local_experts ? static_cast<int32_t>(local) : -1;
    if (is_expert) add_one(global_counts + source * num_experts + expert);
    if (route != 0) return;
    to_all.set(source, 0, num_tokens, rank * max_tokens, tokens);
    home.set(source, source * max_tokens, tokens, rank * max_tokens, num_tokens);
  }
};

// Which rows of [P, max_tokens] belong to a token: a row map [T, P].
struct HomeRows {
  int64_t num_ranks, max_tokens;
  int32_t* row_map;

  EPX_HOST_DEVICE void operator()(int64_t i) const {
    row_map[i] = static_cast<int32_t>(i % num_ranks * max_tokens + i / num_ranks);
  }
};

// ---- Ragged ----

// The slices by which every rank gets each other one's counts: a row of E.
struct CountSlices {
  int rank;
  SliceArrays to_all; // by peer

  EPX_HOST_DEVICE void operator()(int64_t i) const { to_all.set(i, 0, 1, rank, 1); }
};

// From the counts of all ranks: the zones of this rank's experts, and the slices by which the rows of each expert go there. Each
// rank has as many slices as the one with the most experts; those that it has no expert for are empty. Inside a zone the rows of
// the ranks follow each other in rank order.
struct ExpertSlices {
  const int32_t* global_counts; // [P, E]
  const int32_t* own_offsets;   // [E + 1]: where the rows of each expert begin in this rank's sorted rows
  ExpertBlocks experts;
  int64_t alignment;
  int rank;
  SliceArrays slices; // [P, slices_per_rank()], by owner
  int32_t* counts;    // [E_l]
  int32_t* offsets;   // [E_l + 1]

  EPX_HOST_DEVICE static int slices_per_rank(const ExpertBlocks& experts) {
    return (experts.num_experts + experts.num_ranks - 1) / experts.num_ranks;
  }
  EPX_HOST_DEVICE int64_t count(int source, int expert) const {
    return global_counts[static_cast<int64_t>(source) * experts.num_experts + expert];
  }
  EPX_HOST_DEVICE int64_t rows_of(int expert, int num_sources) const {
    int64_t rows = 0;
    for (int source = 0; source < num_sources; ++source)
      rows += count(source, expert);
    return rows;
  }
  EPX_HOST_DEVICE int64_t padded(int64_t rows) const { return (rows + alignment - 1) / alignment * alignment; }

  EPX_HOST_DEVICE void operator()(int64_t i) const { // of the slices
    const auto owner = static_cast<int>(i / slices_per_rank(experts)),
               local = static_cast<int>(i % slices_per_rank(experts));
    // The slice's expert, and that of this rank whose rows from `owner` entry i of recv_sizes counts.
    const int expert = experts.first_expert(owner) + local, own_expert = experts.first_expert(rank) + local;
    const bool has_expert = local < experts.num_local_experts(owner);
    const int64_t recv_size = local < experts.num_local_experts(rank) ? count(owner, own_expert) : 0;
    int64_t zone = 0;
    for (int before = experts.first_expert(owner); before < expert; ++before)
      zone += padded(rows_of(before, experts.num_ranks));
    if (has_expert)
      slices.set(i, own_offsets[expert], count(rank, expert), zone + rows_of(expert, rank), recv_size);
    else
      slices.set(i, 0, 0, 0, recv_size);
    if (owner != rank) return;
    if (has_expert) {
      counts[local] = static_cast<int32_t>(rows_of(expert, experts.num_ranks));
      offsets[local] = static_cast<int32_t>(zone);
      if (local == experts.num_local_experts(rank) - 1)
        offsets[local + 1] = static_cast<int32_t>(zone + padded(counts[local]));
    } else if (local == 0) {
      offsets[0] = 0;
    }
  }
};

} // namespace epx::moe
