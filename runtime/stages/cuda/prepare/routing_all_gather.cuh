// SPDX-License-Identifier: Apache-2.0
// The routing all-gather: prepare when the routes of every rank are few enough to be exchanged, so that each rank computes the
// slots of all ranks. See prepare.cu.
#pragma once

#include "base/device/launch.h"
#include "runtime/stages/cuda/prepare/slot_assignment.cuh"

namespace epx::cuda {

// Returns whether the routes of a rank with so many tokens fit the routing all-gather.
__device__ __forceinline__ bool fits_all_gather(const PrepareContext& c, int64_t num_tokens) {
  return num_tokens * c.args.top_k <= c.layout.gathered_routes_per_rank && !c.call.forces_ht_path();
}

// The LL packets of the experts of `source`'s routes, in the window of `owner`.
__device__ __forceinline__ LlPacket8* routes_of(const PrepareContext& c, int owner, int source) {
  const int64_t row = c.call.parity() * c.shape.num_ranks + source;
  return c.group.window().at<LlPacket8>(owner, c.layout.gathered_routes.offset) + row * c.layout.gathered_routes_per_rank;
}

// The leader CTA has no tokens to assign, unless it is the only block.
__device__ __forceinline__ bool is_all_gather_leader(const PrepareContext& c) {
  return blockIdx.x == c.role.num_blocks - 1;
}
// In the leader CTA: the routes of this rank [E], and those of the ranks before it [E].
__device__ __forceinline__ int32_t* own_counts(const PrepareContext& c) {
  return c.warp_base;
}
__device__ __forceinline__ int32_t* counts_before_own(const PrepareContext& c) {
  return c.warp_base + c.shape.num_experts;
}

// Before the entry barrier: all blocks together store this rank's routes in the window of every rank, this one included.
__device__ __forceinline__ void publish_routes(const PrepareContext& c) {
  const auto routes = static_cast<uint32_t>(c.args.num_tokens * c.args.top_k);
  const uint32_t packets = routes * static_cast<uint32_t>(c.shape.num_ranks);
#pragma unroll 1
  for (uint32_t i = thread_in_grid(); i < packets; i += threads_that_prepare(c)) {
    const uint32_t peer = i / routes;
    const uint32_t route = i - peer * routes;
    store_packet(c, routes_of(c, static_cast<int>(peer), c.call.rank()) + route, expert_of_route(c, route));
  }
#pragma unroll 1
  for (int e = threadIdx.x; e < c.shape.num_experts; e += kThreads)
    c.demand[e] = c.next[e] = own_counts(c)[e] = counts_before_own(c)[e] = 0; // for count_gathered_routes()
  if (!is_all_gather_leader(c)) return; // the leader CTA reports bad indices, unless the count exchange does
  if (threadIdx.x == 0) c.shared.bad_indices = {0, 0};
  __syncthreads();
#pragma unroll 1
  for (uint32_t route = threadIdx.x; route < routes; route += kThreads)
    if (expert_of_route(c, route) < 0) count_if_bad(c, route);
}

// The block waits for the routes of all ranks and copies their experts to gathered_experts. It adds the routes of all ranks to
// `demand`, by expert, and those numbered below begin_route to `next`; routes are numbered through all ranks, in rank order.
// The leader CTA also counts the routes of this rank, and those of the ranks before it. Returns false, in the threads that
// find it, when the group has failed.
__device__ __forceinline__ bool count_gathered_routes(const PrepareContext& c, int begin_route) {
  constexpr int kBatch = 4; // loads that a thread has in flight together
  struct GatheredRoute {
    const LlPacket8* place;
    LlPacket8 packet;
    int source;
  };
  const int routes = c.shared.token_offsets[c.shape.num_ranks] * c.args.top_k;
  int source = 0;
  int first_of_source = 0; // its first route
#pragma unroll 1
  for (int first = threadIdx.x; first < routes; first += kBatch * kThreads) {
    GatheredRoute gathered[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int route = first + i * kThreads;
      gathered[i] = {};
      if (route >= routes) continue;
#pragma unroll 1
      for (int end; (end = c.shared.token_offsets[source + 1] * c.args.top_k) <= route; ++source)
        first_of_source = end;
      const LlPacket8* const place = routes_of(c, c.call.rank(), source) + (route - first_of_source);
      gathered[i] = {place, load_packet_relaxed_sys(place), source};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int route = first + i * kThreads;
      const GatheredRoute& from = gathered[i];
      if (from.place == nullptr) continue;
      int32_t expert = from.packet.value;
      if (from.packet.epoch != c.call.epoch() && !wait_for_packet(c, from.place, from.source, expert)) return false;
      // The value may be anything, and it becomes an index.
      if (static_cast<uint32_t>(expert) >= static_cast<uint32_t>(c.shape.num_experts)) expert = -1;
      c.gathered_experts[route] = static_cast<int16_t>(expert);
      if (expert < 0) continue;
      atomicAdd(&c.demand[expert], 1);
      if (route < begin_route) atomicAdd(&c.next[expert], 1);
      if (is_all_gather_leader(c) && from.source <= c.call.rank())
        atomicAdd(&(from.source < c.call.rank() ? counts_before_own(c) : own_counts(c))[expert], 1);
    }
  }
  return true;
}

// Returns the source rank of a token; `token` is a number among the tokens of all ranks, in rank order.
__device__ __forceinline__ int rank_of_token(const PrepareContext& c, uint32_t token) {
  int rank = 0;
  while (static_cast<uint32_t>(c.shared.token_offsets[rank + 1]) <= token)
    ++rank;
  return rank;
}

// The slots on this rank of the routes of a token [K]; movements read them on the low-latency path.
__device__ __forceinline__ int32_t* ll_slots_of(const PrepareContext& c, int source, int token) {
  return c.plan.ll_slots + (source * c.layout.ll_tokens + token) * c.args.top_k;
}

// Behind the entry barrier: the routes of all ranks fit and are published. No rank has more than max_tokens tokens. Returns
// false, the same in all threads, when the group has failed.
__device__ __forceinline__ bool routing_all_gather(const PrepareContext& c, int32_t max_tokens) {
  const int own_rank = c.call.rank();
  const int num_experts = c.shape.num_experts;
  int32_t* const token_offsets = c.shared.token_offsets;
  if (static_cast<int>(threadIdx.x) <= c.shape.num_ranks) {
    int32_t tokens = 0;
#pragma unroll 4
    for (int rank = 0; rank < static_cast<int>(threadIdx.x); ++rank)
      tokens += tokens_of(c, rank);
    token_offsets[threadIdx.x] = tokens;
  }
  __syncthreads();

  // Count: `next` becomes the slot of this block's first route to each expert.
  const TokenRange tokens = partition_tokens(token_offsets[c.shape.num_ranks], max(c.role.num_blocks - 1, 1u));
  const bool ok = count_gathered_routes(c, static_cast<int>(tokens.begin) * c.args.top_k);
  if (__syncthreads_and(ok ? 1 : 0) == 0) return false;
  find_zones(c);
#pragma unroll 1
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    c.next[e] += c.zone[e];
    if (is_all_gather_leader(c)) count_dropped(c, e, c.zone[e] + counts_before_own(c)[e], own_counts(c)[e]);
  }
  __syncthreads();
  if (c.role.triggers_successor) trigger_successor(); // no thread waits for a peer after this

  // Assign the slots of all ranks' tokens, and store in the handle memory what concerns this rank.
  const int32_t ll_tokens = max_tokens <= c.layout.ll_tokens ? max_tokens : 0;
  const uint32_t tile_tokens = kThreads / c.args.top_k;
#pragma unroll 1
  for (uint32_t begin = tokens.begin; begin < tokens.end; begin += tile_tokens) {
    const uint32_t end = min(begin + tile_tokens, tokens.end);
    const uint32_t token = begin + threadIdx.x / c.args.top_k;
    const int k = threadIdx.x % c.args.top_k;
    const int source = token < end ? rank_of_token(c, token) : 0;
    const int token_of_source = static_cast<int>(token) - token_offsets[source];
    const int expert = token < end ? c.gathered_experts[token * c.args.top_k + k] : -1;
    if (begin == tokens.begin && (end - begin) * c.args.top_k <= kWarp)
      assign_tile_of_one_warp(c, expert);
    else
      assign_tile(c, expert);
    const int32_t slot = c.shared.tile_ranks[threadIdx.x] == own_rank ? c.shared.tile_slots[threadIdx.x] : -1;
    if (token < end && ll_tokens > 0) {
      int32_t* const ll_slot = &ll_slots_of(c, source, token_of_source)[k];
      if (c.role.slot_packets != nullptr) // first, because other blocks wait for it
        store_packet(c, c.role.slot_packets + (ll_slot - c.plan.ll_slots), slot);
      *ll_slot = slot;
    }
    __syncthreads();
    if (token < end) {
      const SlotRecord record = record_of_route(c, source, token_of_source, k);
      if (source == own_rank) store_own_route(c, record);
      if (slot >= 0) store_slot_record(c, slot, record);
    }
    // One thread stores each token's first slot, so that neighbouring threads' stores coalesce. The last threads do it, since
    // they have no route where the tokens are few.
    if (const uint32_t number = kThreads - 1 - threadIdx.x; number < end - begin) {
      const uint32_t other = begin + number;
      const int rank = rank_of_token(c, other);
      const int64_t index = int64_t{rank} * c.shape.max_tokens_per_rank + (static_cast<int>(other) - token_offsets[rank]);
      c.plan.first_slots[index] = first_slot_of(c, static_cast<int>(number), own_rank);
    }
    __syncthreads();
  }
  if (threadIdx.x == kThreads - 1) sent(c);

  // Deliver the totals, the entries of the tokens that a source does not have, and the records of the pads. Those entries
  // become -1, because the handle memory may hold anything, such as the slots of an earlier prepare.
  const int32_t rows = rows_needed(c);
  const auto rows_in_use = static_cast<uint32_t>(clamp_rows(rows, c.usable_slots));
  if (is_all_gather_leader(c)) deliver_totals(c, rows, ll_tokens, c.shared.bad_indices);
  const auto max_tokens_per_rank = static_cast<uint32_t>(c.shape.max_tokens_per_rank);
#pragma unroll 1
  for (uint32_t i = thread_in_grid(); i < c.shape.num_ranks * max_tokens_per_rank; i += threads_that_prepare(c)) {
    const int source = static_cast<int>(i / max_tokens_per_rank);
    const int token = static_cast<int>(i % max_tokens_per_rank);
    if (token < c.call.descriptors().num_tokens[source]) continue;
    c.plan.first_slots[i] = -1;
#pragma unroll 1
    for (int k = 0; k < c.args.top_k && token < ll_tokens; ++k) // movements do not read ll_slots beyond ll_tokens
      ll_slots_of(c, source, token)[k] = -1;
  }
#pragma unroll 1
  for (uint32_t slot = thread_in_grid(); slot < rows_in_use; slot += threads_that_prepare(c))
    if (const int e = expert_of_slot(c, slot); static_cast<int32_t>(slot) - c.zone[e] >= c.demand[e])
      store_slot_record(c, slot, kPadRecord);
  deliver_unused_origins(c, rows_in_use);
  if (c.args.global_counts == nullptr) return true;
#pragma unroll 1
  for (int rank = static_cast<int>(blockIdx.x); rank < c.shape.num_ranks; rank += static_cast<int>(c.role.num_blocks)) {
    const int end = token_offsets[rank + 1] * c.args.top_k;
    __syncthreads(); // `next` is no longer used
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts; e += kThreads)
      c.next[e] = 0;
    __syncthreads();
#pragma unroll 1
    for (int route = token_offsets[rank] * c.args.top_k + threadIdx.x; route < end; route += kThreads)
      if (c.gathered_experts[route] >= 0) atomicAdd(&c.next[c.gathered_experts[route]], 1);
    __syncthreads();
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts; e += kThreads)
      store_count(c.args, c.args.global_counts, int64_t{rank} * num_experts + e, c.next[e]);
  }
  return true;
}

} // namespace epx::cuda
