// SPDX-License-Identifier: Apache-2.0
// What both algorithms of prepare do once they have counted the routes: they find the zones, give every route its slot, and
// write the totals.
#pragma once

#include "runtime/stages/cuda/prepare/prepare_context.cuh"

namespace epx::cuda {

// ---- Zones ----

__device__ __forceinline__ int32_t inclusive_sum(int32_t value) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int32_t left = __shfl_up_sync(~0u, value, distance);
    if (lane() >= distance) value += left;
  }
  return value;
}

// This and end_of_zone() are ZoneRule in 32 bits: a 64-bit division takes long, and slots are int32.
__device__ __forceinline__ int32_t rows_of_zone(const PrepareContext& c, int32_t demand) {
  if (c.args.zone_stride != 0) return static_cast<int32_t>(c.args.zone_stride);
  const auto alignment = static_cast<uint32_t>(c.args.alignment);
  if (alignment == 1) return demand;
  return static_cast<int32_t>((static_cast<uint32_t>(demand) + alignment - 1) / alignment * alignment);
}

// Computes zone[e] of all experts. All threads of the block call this behind a barrier that completes demand; it ends with a
// barrier, behind which all may read zone.
__device__ __forceinline__ void find_zones(const PrepareContext& c) {
#pragma unroll 1
  for (int rank = threadIdx.x / kWarp; rank < c.shape.num_ranks; rank += kWarps) {
    const int end_of_rank = c.experts.first_expert(rank + 1);
    const int per_lane = (c.experts.num_local_experts(rank) + kWarp - 1) / kWarp;
    const int first = c.experts.first_expert(rank) + lane() * per_lane;
    const int end = min(first + per_lane, end_of_rank);
    int32_t rows = 0; // of the lane's experts
#pragma unroll 1
    for (int e = first; e < end; ++e)
      rows += rows_of_zone(c, c.demand[e]);
    int32_t next = inclusive_sum(rows) - rows;
#pragma unroll 1
    for (int e = first; e < end; ++e) {
      c.zone[e] = next;
      next += rows_of_zone(c, c.demand[e]);
    }
  }
  __syncthreads();
}

// Damaged counts may add up to more than 31 bits, so that a sum of rows may even be negative.
__device__ __forceinline__ int32_t clamp_rows(int32_t rows, int32_t usable_slots) {
  return max(0, min(rows, usable_slots));
}
// Returns the end of the slots that an expert's zone may have. Behind find_zones().
__device__ __forceinline__ int32_t end_of_zone(const PrepareContext& c, int expert) {
  if (c.args.zone_stride == 0) return c.usable_slots;
  return c.zone[expert] + static_cast<int32_t>(c.args.zone_stride);
}
// Returns how many of `routes` routes to an expert are kept, the first of which would have the slot `first`.
__device__ __forceinline__ int32_t kept_routes(const PrepareContext& c, int expert, int32_t first, int32_t routes) {
  return max(0, min(end_of_zone(c, expert) - clamp_rows(first, c.usable_slots), routes));
}
// One thread calls this for all routes of this rank to an expert.
__device__ __forceinline__ void count_dropped(const PrepareContext& c, int expert, int32_t first, int32_t routes) {
  const int32_t kept = kept_routes(c, expert, first, routes);
  if (kept < routes) atomicAdd(&c.shared.dropped_routes, static_cast<uint32_t>(routes - kept));
}

// Returns the rows that this rank's zones take, whether it has so many slots or not.
__device__ __forceinline__ int32_t rows_needed(const PrepareContext& c) {
  const int last = c.experts.first_expert(c.call.rank() + 1) - 1;
  return last < c.experts.first_expert(c.call.rank()) ? 0 : c.zone[last] + rows_of_zone(c, c.demand[last]);
}

// Returns the expert, among all experts, in whose local zone a slot in use lies.
__device__ __forceinline__ int expert_of_slot(const PrepareContext& c, int32_t slot) {
  int low = c.experts.first_expert(c.call.rank()); // its zone begins at or before the slot
  int high = c.experts.first_expert(c.call.rank() + 1);
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (c.zone[middle] <= slot ? low : high) = middle;
  }
  return low;
}

// ---- Tiles ----
//
// The block walks its range of tokens in tiles of kThreads / K tokens, so that each thread has one route; the routes of a token
// are in neighbouring threads.

// Each thread calls this with the slot of its own route.
__device__ __forceinline__ void store_tile_slot(const PrepareContext& c, int expert, int32_t slot) {
  if (slot < 0 || slot >= (expert >= 0 ? end_of_zone(c, expert) : 0)) slot = -1;
  c.shared.tile_slots[threadIdx.x] = slot;
  c.shared.tile_ranks[threadIdx.x] = slot >= 0 ? c.experts.rank_of(expert) : -1;
}

// Assigns the slots of a tile: tile_slots and tile_ranks get those of each thread's route to `expert`, and `next` goes on to
// the next tile. All threads of the block call this. A barrier must follow before a thread reads those of others, and another
// one before the next tile.
__device__ __forceinline__ void assign_tile(const PrepareContext& c, int expert) {
  const int num_experts = c.shape.num_experts;
  const int thread = threadIdx.x;

  // A route's position among the tile's routes to the same expert: first come the routes of the warps before, then those of
  // the lanes before. This keeps the sort stable.
#pragma unroll 1
  for (int i = thread; i < num_experts * kWarps; i += kThreads)
    c.warp_base[i] = 0;
  __syncthreads();
  const unsigned same = __match_any_sync(~0u, expert);
  const unsigned before = same & ((1u << lane()) - 1);
  int32_t* const base = c.warp_base + thread / kWarp * num_experts;
  if (expert >= 0 && before == 0) base[expert] = __popc(same);
  __syncthreads();
#pragma unroll 1
  for (int e = thread; e < num_experts; e += kThreads) {
    int32_t counts[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      counts[w] = c.warp_base[w * num_experts + e];
    int32_t next = c.next[e];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      c.warp_base[w * num_experts + e] = next;
      next += counts[w];
    }
    c.next[e] = next;
  }
  __syncthreads();
  store_tile_slot(c, expert, expert >= 0 ? base[expert] + __popc(before) : -1);
}

// The same where the first warp has all routes of the block's only tile, so that a vote takes the place of the sort.
__device__ __forceinline__ void assign_tile_of_one_warp(const PrepareContext& c, int expert) {
  const unsigned before = __match_any_sync(~0u, expert) & ((1u << lane()) - 1);
  store_tile_slot(c, expert, expert >= 0 ? c.next[expert] + __popc(before) : -1);
}

// Returns the record of the slot of this thread's route, which is route k of a token of rank `source`.
__device__ __forceinline__ SlotRecord record_of_route(const PrepareContext& c, int source, int token, int k) {
  const int32_t* const slots = c.shared.tile_slots + (threadIdx.x - k); // [K]: the token's
  const int32_t* const ranks = c.shared.tile_ranks + (threadIdx.x - k);
  const int32_t rank = ranks[k];
  RankMask lower_ranks; // that the token goes to
  int32_t next_slot = -1;
  bool is_first = true;
#pragma unroll 1
  for (int other = c.args.top_k - 1; other >= 0; --other) {
    const int32_t other_slot = slots[other];
    const int32_t other_rank = ranks[other];
    const bool is_same = other_rank == rank && rank >= 0;
    if (other_rank >= 0 && other_rank < rank) lower_ranks.set(other_rank);
    if (is_same && other > k) next_slot = other_slot;
    if (is_same && other < k) is_first = false;
  }
  const SlotRecord record{token,
                          next_slot,
                          static_cast<uint16_t>(source),
                          static_cast<uint8_t>(k),
                          static_cast<uint8_t>(is_first ? 1 : 0),
                          static_cast<uint8_t>(lower_ranks.count() & 0x7f)};
  return record;
}

// Stores this thread's route, which is one of this rank's.
__device__ __forceinline__ void store_own_route(const PrepareContext& c, const SlotRecord& record) {
  const int64_t route = route_index(record.token, c.args.top_k, record.k);
  const int32_t slot = c.shared.tile_slots[threadIdx.x];
  if (c.args.slot != nullptr) c.args.slot[route] = slot;
  c.plan.routes[route] = {slot, c.shared.tile_ranks[threadIdx.x], record.rank_ordinal};
}

// Returns the first slot on `rank` of a token, which is a number in the tile; or -1.
__device__ __forceinline__ int32_t first_slot_of(const PrepareContext& c, int token, int rank) {
  int32_t slot = -1;
#pragma unroll 1
  for (int route = (token + 1) * c.args.top_k - 1; route >= token * c.args.top_k; --route) {
    const int32_t slot_of_route = c.shared.tile_slots[route];
    if (c.shared.tile_ranks[route] == rank) slot = slot_of_route;
  }
  return slot;
}

// ---- Handle memory and outputs ----

__device__ __forceinline__ void store_count(const PrepareCall& args, void* tensor, int64_t index, int64_t value) {
  if (args.counts_are_64)
    static_cast<int64_t*>(tensor)[index] = value;
  else
    static_cast<int32_t*>(tensor)[index] = static_cast<int32_t>(value);
}

__device__ __forceinline__ void store_slot_origin(const PrepareContext& c, int64_t slot, SlotRecord record) {
  int32_t* const origin = c.args.slot_origin + 3 * slot;
  origin[0] = record.is_pad() ? -1 : record.source;
  origin[1] = record.token;
  origin[2] = record.is_pad() ? -1 : record.k;
}
__device__ __forceinline__ void store_slot_record(const PrepareContext& c, int64_t slot, SlotRecord record) {
  c.plan.slot_records[slot] = record;
  if (c.args.slot_origin != nullptr) store_slot_origin(c, slot, record);
}
// All blocks call this together; slots that are not in use have no record.
__device__ __forceinline__ void deliver_unused_origins(const PrepareContext& c, uint32_t rows_in_use) {
  if (c.args.slot_origin == nullptr) return;
  const auto slots = static_cast<uint32_t>(c.shape.max_recv_tokens);
#pragma unroll 1
  for (uint32_t slot = rows_in_use + thread_in_grid(); slot < slots; slot += threads_that_prepare(c))
    store_slot_origin(c, slot, kPadRecord);
}

// One block calls this: the leader CTA of the routing all-gather, or block 0 in the count exchange. It writes the header, the
// zones and the counts, and reports the totals.
__device__ __forceinline__ void deliver_totals(const PrepareContext& c, int32_t rows_needed, int32_t ll_tokens,
                                               BadIndices bad) {
  const int num_local = c.experts.num_local_experts(c.call.rank());
  const int first_expert = c.experts.first_expert(c.call.rank());
  const int32_t* const zone = c.zone + first_expert;
  const int32_t* const demand = c.demand + first_expert;
#pragma unroll 1
  for (int e = threadIdx.x; e < num_local; e += kThreads) {
    const int32_t begin = clamp_rows(zone[e], c.usable_slots);
    const int32_t kept = kept_routes(c, first_expert + e, zone[e], demand[e]);
    c.plan.zone_begin[e] = begin;
    c.plan.zone_rows[e] = kept;
    store_count(c.args, c.args.counts, e, kept);
    store_count(c.args, c.args.offsets, e, begin);
  }
  if (threadIdx.x == kThreads - kWarp - 1) {
    HandleHeader header{};
    header.magic = kHandleMagic;
    header.group_id = c.group.context.group_id;
    header.plan_id = c.call.sequence();
    header.num_tokens = c.args.num_tokens;
    header.rows_in_use = clamp_rows(rows_needed, c.usable_slots);
    header.top_k = c.args.top_k;
    header.alignment = c.args.alignment;
    header.rank = c.call.rank();
    header.ll_tokens = ll_tokens;
    header.rows_per_source = kExpertMajor;
    header.checksum = header_checksum(header);
    *c.plan.header = header;
    c.plan.zone_begin[num_local] = static_cast<int32_t>(header.rows_in_use);
    store_count(c.args, c.args.offsets, num_local, header.rows_in_use);
  }
  if (threadIdx.x / kWarp != kWarps - 1) return;
  int64_t wanted = 0;
  int64_t kept = 0;
#pragma unroll 1
  for (int e = lane(); e < num_local; e += kWarp) {
    wanted += demand[e];
    kept += kept_routes(c, first_expert + e, zone[e], demand[e]);
  }
  for (int distance = 1; distance < kWarp; distance *= 2) {
    wanted += __shfl_xor_sync(~0u, wanted, distance);
    kept += __shfl_xor_sync(~0u, kept, distance);
  }
  if (lane() != 0) return;
  if (c.args.info != nullptr) {
    c.args.info[0] = wanted;
    c.args.info[1] = kept;
    c.args.info[2] = wanted - kept;
    c.args.info[3] = c.shared.dropped_routes;
    c.args.info[4] = rows_needed;
  }
  report_bad_indices(c.call.context(), c.args, bad);
  if (c.group.context.overflow == EPX_OVERFLOW_ERROR && wanted > kept)
    record_event(c.call.context(), EPX_EVENT_OVERFLOW, wanted - kept, wanted, wanted - kept, rows_needed,
                 c.args.zone_stride);
}

} // namespace epx::cuda
