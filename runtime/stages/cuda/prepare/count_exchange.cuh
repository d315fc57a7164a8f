// SPDX-License-Identifier: Apache-2.0
// The count exchange: prepare when the routes of some rank are too many for the routing all-gather. See prepare.cu.
#pragma once

#include "runtime/stages/cuda/prepare/slot_assignment.cuh"

namespace epx::cuda {

// The matrix of counts is double-buffered by the parity of the call: a peer that is already in call n + 1 writes the other one.
__device__ __forceinline__ LlPacket8* counts_of(const PrepareContext& c, int owner, int source) {
  const int64_t row = c.call.parity() * c.shape.num_ranks + source;
  return c.group.window().at<LlPacket8>(owner, c.layout.counts.offset) + row * c.shape.num_experts;
}
// The caller has waited for the count before.
__device__ __forceinline__ int32_t count_of(const PrepareContext& c, int source, int expert) {
  return load_packet_relaxed_sys(&counts_of(c, c.call.rank(), source)[expert]).value;
}

// These return places in the window of `owner`: the LL packets of the records of its slots, and those of the first slots that
// the tokens of `source` have on `owner`.
__device__ __forceinline__ LlSlotRecord* records_at(const PrepareContext& c, int owner) {
  return c.group.window().at<LlSlotRecord>(owner, c.layout.ll_slot_records.offset);
}
__device__ __forceinline__ LlPacket8* first_slots_at(const PrepareContext& c, int owner, int source) {
  return c.group.window().at<LlPacket8>(owner, c.layout.first_slots.offset) + int64_t{source} * c.shape.max_tokens_per_rank;
}

// prepare_scratch has the counts of each block [blocks, E + 2], whose last two columns are its BadIndices, and then the routes
// that the blocks before each block have [blocks, E].
__device__ __forceinline__ LlPacket8* block_counts(const PrepareContext& c, int block) {
  return c.group.prepare_scratch + int64_t{block} * (c.shape.num_experts + 2);
}
__device__ __forceinline__ LlPacket8* routes_before(const PrepareContext& c, int block) {
  return block_counts(c, static_cast<int>(c.role.num_blocks)) + int64_t{block} * c.shape.num_experts;
}

// One warp of the grid adds up and reports the bad indices of the `num_blocks` blocks; `packets` are those of block 0, and
// `stride` leads to those of the next block.
__device__ __noinline__ inline void report_bad_indices_of_blocks(const CallContext& call, const PrepareCall& args,
                                                                 const LlPacket8* packets, int stride, int num_blocks) {
  BadIndices sum{0, 0};
#pragma unroll 1
  for (int block = lane(); block < num_blocks; block += kWarp) {
    const LlPacket8* const bad = packets + int64_t{block} * stride;
    LlPacket8 number = load_packet_relaxed_sys(&bad[0]); // both loads are in flight together
    LlPacket8 first = load_packet_relaxed_sys(&bad[1]);
    if (number.epoch != call.epoch() || first.epoch != call.epoch()) {
      if (!wait_long(call, &bad[0].epoch, call.rank(), EPX_PHASE_COMPLETE) ||
          !wait_long(call, &bad[1].epoch, call.rank(), EPX_PHASE_COMPLETE))
        break;
      number = load_packet_relaxed_sys(&bad[0]);
      first = load_packet_relaxed_sys(&bad[1]);
    }
    sum.number += number.value;
    sum.first_inverted = max(sum.first_inverted, static_cast<unsigned>(first.value));
  }
  for (int distance = 1; distance < kWarp; distance *= 2) {
    sum.number += __shfl_xor_sync(~0u, sum.number, distance);
    sum.first_inverted = max(sum.first_inverted, __shfl_xor_sync(~0u, sum.first_inverted, distance));
  }
  if (lane() == 0) report_bad_indices(call, args, sum);
}

// Counts the routes of this block's tokens by expert, adds up the counts of some experts over all blocks, and stores the sums
// in the window of every rank. All threads of the block call this: before the entry barrier if this rank's routes do not fit
// the routing all-gather, else behind it. Returns false, the same in all threads, when the group has failed.
__device__ __forceinline__ bool publish_counts(const PrepareContext& c) {
  const int num_experts = c.shape.num_experts;
  const int num_blocks = static_cast<int>(c.role.num_blocks);
  const int warp = threadIdx.x / kWarp;

  // Count the routes of this block's tokens by expert.
#pragma unroll 1
  for (int e = threadIdx.x; e < num_experts; e += kThreads)
    c.next[e] = 0;
  if (threadIdx.x == 0) c.shared.bad_indices = {0, 0};
  __syncthreads();
  const TokenRange tokens = partition_tokens(c.args.num_tokens, c.role.num_blocks);
#pragma unroll 1
  for (int64_t route = int64_t{tokens.begin} * c.args.top_k + threadIdx.x; route < int64_t{tokens.end} * c.args.top_k;
       route += kThreads) {
    if (const int expert = expert_of_route(c, route); expert >= 0)
      atomicAdd(&c.next[expert], 1);
    else
      count_if_bad(c, route);
  }
  __syncthreads();
  LlPacket8* const own_counts = block_counts(c, static_cast<int>(blockIdx.x));
#pragma unroll 1
  for (int e = threadIdx.x; e < num_experts; e += kThreads)
    store_packet(c, &own_counts[e], c.next[e]);
  if (threadIdx.x == 0) {
    store_packet(c, &own_counts[num_experts], c.shared.bad_indices.number);
    store_packet(c, &own_counts[num_experts + 1], static_cast<int32_t>(c.shared.bad_indices.first_inverted));
  }

  // This block adds up the counts of some experts over all blocks.
  const int per_block = (num_experts + num_blocks - 1) / num_blocks;
  const int first_expert = min(static_cast<int>(blockIdx.x) * per_block, num_experts);
  const int experts = min(per_block, num_experts - first_expert);
  int32_t* const counts = c.warp_base; // [experts, num_blocks]
  bool ok = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < experts * num_blocks && ok; i += kThreads) {
    const int block = i / experts;
    const int expert = i % experts;
    ok = wait_for_packet(c, &block_counts(c, block)[first_expert + expert], c.call.rank(),
                         counts[expert * num_blocks + block]);
  }
  if (__syncthreads_and(ok ? 1 : 0) == 0) return false;
#pragma unroll 1
  for (int expert = warp; expert < experts; expert += kWarps) {
    int32_t total = 0;
#pragma unroll 1
    for (int begin = 0; begin < num_blocks; begin += kWarp) {
      const int block = begin + lane();
      const int32_t count = block < num_blocks ? counts[expert * num_blocks + block] : 0;
      const int32_t sum = inclusive_sum(count);
      if (block < num_blocks) store_packet(c, &routes_before(c, block)[first_expert + expert], total + sum - count);
      total += __shfl_sync(~0u, sum, kWarp - 1);
    }
#pragma unroll 1
    for (int peer = lane(); peer < c.shape.num_ranks; peer += kWarp)
      store_packet(c, &counts_of(c, peer, c.call.rank())[first_expert + expert], total);
  }
  return true;
}

// Returns the rank whose route to the expert has this index in its zone.
__device__ __forceinline__ int source_of(const PrepareContext& c, int expert, int32_t index) {
  int64_t before = 0;
  int source = 0;
#pragma unroll 1
  for (; source < c.shape.num_ranks - 1; ++source) {
    before += count_of(c, source, expert);
    if (index < before) break;
  }
  return source;
}

// Finds the demand for an expert, and how far from the begin of its zone the first route of this block is: in a zone the routes
// of the ranks before this one come first, and then those of the blocks before this one. One thread calls this. Returns false
// when the group has failed.
__device__ __forceinline__ bool find_base(const PrepareContext& c, int expert) {
  constexpr int kBatch = 4; // loads of counts that are in flight together, with that of routes_before
  const int own_rank = c.call.rank();
  // A count from the window, where anything may lie, is clamped to the routes that a rank can have to an expert.
  const auto max_routes = static_cast<uint32_t>(c.shape.max_tokens_per_rank * c.args.top_k);
  const LlPacket8* const before = &routes_before(c, static_cast<int>(blockIdx.x))[expert];
  LlPacket8 routes = load_packet_relaxed_sys(before);
  int32_t demand = 0, base = 0;
#pragma unroll 1
  for (int first = 0; first < c.shape.num_ranks; first += kBatch) {
    LlPacket8 counts[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i < c.shape.num_ranks) counts[i] = load_packet_relaxed_sys(&counts_of(c, own_rank, first + i)[expert]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int source = first + i;
      if (source >= c.shape.num_ranks) continue;
      if (!c.call.wait_for_loaded_packet(&counts_of(c, own_rank, source)[expert], counts[i], source)) return false;
      const auto count = static_cast<int32_t>(min(static_cast<uint32_t>(counts[i].value), max_routes));
      demand += count;
      if (source < own_rank) base += count;
    }
  }
  if (!c.call.wait_for_loaded_packet(before, routes, own_rank)) return false;
  c.demand[expert] = demand;
  c.next[expert] = base + routes.value;
  return true;
}

// Behind the entry barrier: this rank's counts are published. Returns false, in some threads of a block or in all, when the
// group has failed.
__device__ __forceinline__ bool count_exchange(const PrepareContext& c) {
  const int num_experts = c.shape.num_experts;
  const int num_counts = c.shape.num_ranks * num_experts;
  const int num_blocks = static_cast<int>(c.role.num_blocks);
  const int own_rank = c.call.rank();

  if (blockIdx.x == 0 && threadIdx.x / kWarp == kWarps - 1) // while others find the bases of few experts
    report_bad_indices_of_blocks(c.call.context(), c.args, block_counts(c, 0) + num_experts, num_experts + 2, num_blocks);

  // Find the bases: `next` becomes the slot of this block's first route to each expert.
  bool ok = true;
#pragma unroll 1
  for (int e = threadIdx.x; e < num_experts && ok; e += kThreads)
    ok = find_base(c, e);
  if (__syncthreads_and(ok ? 1 : 0) == 0) return false;
  find_zones(c);
#pragma unroll 1
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    c.next[e] += c.zone[e];
    if (blockIdx.x == 0) count_dropped(c, e, c.next[e], count_of(c, own_rank, e)); // block 0 has this rank's first routes
  }
  __syncthreads();

  // Assign the slots of this rank's tokens, and store LL packets in the windows, this rank's included: the record of each slot
  // on its rank, and each token's first slot, or -1, on every rank.
  const TokenRange tokens = partition_tokens(c.args.num_tokens, c.role.num_blocks);
  const uint32_t tile_tokens = kThreads / c.args.top_k;
#pragma unroll 1
  for (uint32_t begin = tokens.begin; begin < tokens.end; begin += tile_tokens) {
    const uint32_t end = min(begin + tile_tokens, tokens.end);
    const uint32_t token = begin + threadIdx.x / c.args.top_k;
    const int k = threadIdx.x % c.args.top_k;
    assign_tile(c, token < end ? expert_of_route(c, route_index(token, c.args.top_k, k)) : -1);
    __syncthreads();
    if (token < end) {
      const SlotRecord record = record_of_route(c, own_rank, static_cast<int>(token), k);
      store_own_route(c, record);
      if (const int32_t slot = c.shared.tile_slots[threadIdx.x]; slot >= 0)
        store_packet_relaxed_sys(records_at(c, c.shared.tile_ranks[threadIdx.x]) + slot,
                                 LlSlotRecord{record, c.call.epoch()});
    }
    const int num_tokens = static_cast<int>(end - begin);
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tokens * c.shape.num_ranks; i += kThreads) { // neighbouring threads' stores coalesce
      const int rank = i / num_tokens;
      const int in_tile = i % num_tokens;
      store_packet(c, first_slots_at(c, rank, own_rank) + begin + in_tile, first_slot_of(c, in_tile, rank));
    }
    __syncthreads();
  }
  if (threadIdx.x == kThreads - 1) sent(c);

  // Deliver the totals, and what the peers have stored. Movements look first slots up by (source, token); the entries beyond a
  // source's tokens become -1, because the handle memory may hold anything, such as the slots of an earlier prepare.
  const int32_t rows = rows_needed(c);
  const auto rows_in_use = static_cast<uint32_t>(clamp_rows(rows, c.usable_slots));
  if (blockIdx.x == 0) deliver_totals(c, rows, 0, {0, 0});
  const auto max_tokens = static_cast<uint32_t>(c.shape.max_tokens_per_rank);
#pragma unroll 1
  for (uint32_t i = thread_in_grid(); i < c.shape.num_ranks * max_tokens; i += threads_that_prepare(c)) {
    const int source = static_cast<int>(i / max_tokens);
    const bool is_token = static_cast<int>(i % max_tokens) < c.call.descriptors().num_tokens[source];
    int32_t slot = -1;
    if (is_token && !wait_for_packet(c, first_slots_at(c, own_rank, 0) + i, source, slot)) return false;
    c.plan.first_slots[i] = slot;
  }
#pragma unroll 1
  for (uint32_t slot = thread_in_grid(); slot < rows_in_use; slot += threads_that_prepare(c)) {
    const LlSlotRecord* const place = records_at(c, own_rank) + slot;
    const int e = expert_of_slot(c, slot);
    const int32_t index = static_cast<int32_t>(slot) - c.zone[e];
    LlSlotRecord packet{kPadRecord, c.call.epoch()};
    if (index < c.demand[e]) packet = load_packet_relaxed_sys(place);
    if (packet.epoch != c.call.epoch() && !c.call.wait_for_packet(place, packet, source_of(c, e, index))) return false;
    store_slot_record(c, slot, packet.record);
  }
  deliver_unused_origins(c, rows_in_use);
  if (c.args.global_counts == nullptr) return true;
#pragma unroll 1
  for (uint32_t i = thread_in_grid(); i < static_cast<uint32_t>(num_counts); i += threads_that_prepare(c))
    store_count(c.args, c.args.global_counts, i,
                count_of(c, static_cast<int>(i) / num_experts, static_cast<int>(i) % num_experts));
  return true;
}

} // namespace epx::cuda
