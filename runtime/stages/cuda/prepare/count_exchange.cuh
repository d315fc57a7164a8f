// SPDX-License-Identifier: Apache-2.0
// The count exchange: prepare when the routes of some rank are too many for the routing all-gather. See prepare.cu.
#pragma once

#include "runtime/stages/cuda/prepare/slot_assignment.cuh"

namespace epx::cuda {

class CountExchange : public SlotAssignment<CountExchange> {
public:
  static constexpr bool kWritesLocally = false;

  __device__ explicit CountExchange(const PrepareCta& cta) : SlotAssignment(cta) {}

  // Returns false, the same in all threads, when the group has failed.
  __device__ bool count_and_publish() {
    count();
    return publish();
  }

  // Computes next_, demand_ and zone_. Returns false, the same in all threads, when the group has failed.
  __device__ bool find_bases() {
    bool ok = true;
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads) {
      demand_[e] = 0;
      if (ok) ok = wait_for(&routes_before(blockIdx.x)[e], call_.rank(), next_[e]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < shape_.num_ranks * num_experts() && ok; i += kThreads) {
      const int source = i / num_experts();
      const int e = i % num_experts();
      int32_t routes = 0;
      ok = wait_for(&counts_of(call_.rank(), source)[e], source, routes);
      if (routes == 0) continue;
      routes = bounded_count(routes);
      atomicAdd(&demand_[e], routes);
      if (source < call_.rank()) atomicAdd(&next_[e], routes);
    }
    if (__syncthreads_and(ok ? 1 : 0) == 0) return false;
    find_zones();
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads) {
      next_[e] += zone_[e];
      if (blockIdx.x == 0) count_dropped(next_[e], count_of(call_.rank(), e)); // block 0 has this rank's first routes
    }
    __syncthreads();
    return true;
  }

  __device__ Origin origin_of(int64_t token) const {
    return {call_.rank(), token};
  }
  using PrepareCta::expert_of;
  __device__ int expert_of(int64_t token, int k) const {
    return expert_of(token * args_.top_k + k);
  }
  __device__ void put_slot(const Origin&, int, int32_t, int32_t) const {}
  __device__ void put_no_slots(const Origin&) const {}
  __device__ void put_record(int rank, int32_t slot, SlotRecord record) const {
    store_packet_relaxed_sys(group_.window().at<LlSlotRecord>(rank, group_.context.layout.ll_slot_records.offset) + slot,
                             LlSlotRecord{record, call_.epoch()});
  }
  __device__ void put_first_slot(int rank, int64_t index, int32_t first_slot) const {
    store_packet(group_.window().at<LlPacket8>(rank, group_.context.layout.first_slots.offset) + index, first_slot);
  }
  // Returns false when the group has failed, as does take_first_slot().
  __device__ bool take_record(uint32_t slot, SlotRecord& record) const {
    const LlSlotRecord* const place =
        group_.window().local<LlSlotRecord>(group_.context.layout.ll_slot_records.offset) + slot;
    LlSlotRecord packet = load_packet_relaxed_sys(place);
    if (packet.epoch != call_.epoch() && !call_.wait_for_word(place, packet, CountExchange(*this).source_of(slot)))
      return false;
    record = packet.record;
    return true;
  }
  __device__ bool take_first_slot(int source, uint32_t index, int32_t& first_slot) const {
    return wait_for(group_.window().local<LlPacket8>(group_.context.layout.first_slots.offset) + index, source, first_slot);
  }
  __device__ bool is_leader_cta() const {
    return blockIdx.x == 0;
  }
  __device__ int32_t ll_tokens() const {
    return 0;
  }
  __device__ void deliver_global_counts() const {
    const auto experts = static_cast<uint32_t>(num_experts());
#pragma unroll 1
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < static_cast<uint32_t>(shape_.num_ranks) * experts;
         i += gridDim.x * kThreads)
      store_count(args_.global_counts, i, count_of(static_cast<int>(i / experts), static_cast<int>(i % experts)));
  }

private:
  // The matrix of counts is double-buffered by the parity of the call: a peer that is already in call n + 1 writes the other
  // one.
  __device__ LlPacket8* counts_of(int owner, int source) const {
    const int64_t row = call_.parity() * shape_.num_ranks + source;
    return group_.window().at<LlPacket8>(owner, group_.context.layout.counts.offset) + row * num_experts();
  }
  // Clamps a count from the window, where anything may lie, to the routes that a rank can have to an expert.
  __device__ int32_t bounded_count(int32_t routes) const {
    const auto max_routes = static_cast<uint32_t>(shape_.max_tokens_per_rank * args_.top_k);
    return static_cast<int32_t>(min(static_cast<uint32_t>(routes), max_routes));
  }
  // The caller has waited for the count before.
  __device__ int32_t count_of(int source, int expert) const {
    return load_packet_relaxed_sys(&counts_of(call_.rank(), source)[expert]).value;
  }
  // A row has two columns more than there are experts: the number of bad indices that the block has seen, and the first of them
  // as ~ of its route.
  __device__ LlPacket8* block_counts(int block) const {
    return group_.prepare_scratch + static_cast<int64_t>(block) * (num_experts() + 2);
  }
  __device__ LlPacket8* routes_before(int block) const {
    return group_.prepare_scratch + static_cast<int64_t>(gridDim.x) * (num_experts() + 2) +
           static_cast<int64_t>(block) * num_experts();
  }

  __device__ void count() {
    partition(args_.num_tokens, gridDim.x);
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      next_[e] = 0;
    clear_bad_indices();
    BadIndices& bad = bad_indices();
#pragma unroll 1
    for (int64_t route = begin_ * args_.top_k + threadIdx.x; route < end_ * args_.top_k; route += kThreads) {
      if (const int expert = expert_of(route); expert >= 0)
        atomicAdd(&next_[expert], 1);
      else
        bad.add(route, index_at(route));
    }
    __syncthreads();
    LlPacket8* const own_counts = block_counts(blockIdx.x);
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      store_packet(&own_counts[e], next_[e]);
    if (threadIdx.x == 0) {
      store_packet(&own_counts[num_experts()], bad.number);
      store_packet(&own_counts[num_experts() + 1], static_cast<int32_t>(bad.first_inverted));
    }
  }

  // Returns false, the same in all threads, when the group has failed.
  __device__ bool publish() {
    const int blocks = static_cast<int>(gridDim.x);
    const int per_block = (num_experts() + blocks - 1) / blocks;
    const int first = min(static_cast<int>(blockIdx.x) * per_block, num_experts());
    const int experts = min(per_block, num_experts() - first);
    int32_t* const counts = warp_base_; // [experts, blocks]
    bool ok = true;
#pragma unroll 1
    for (int i = threadIdx.x; i < experts * blocks && ok; i += kThreads) {
      const int block = i / experts;
      const int expert = i % experts;
      ok = wait_for(&block_counts(block)[first + expert], call_.rank(), counts[expert * blocks + block]);
    }
    if (__syncthreads_and(ok ? 1 : 0) == 0) return false;
#pragma unroll 1
    for (int expert = threadIdx.x / kWarp; expert < experts; expert += kWarps) {
      int32_t total = 0;
#pragma unroll 1
      for (int begin = 0; begin < blocks; begin += kWarp) {
        const int block = begin + lane();
        const int32_t count = block < blocks ? counts[expert * blocks + block] : 0;
        const int32_t sum = inclusive_sum(count);
        if (block < blocks) store_packet(&routes_before(block)[first + expert], total + sum - count);
        total += __shfl_sync(~0u, sum, kWarp - 1);
      }
#pragma unroll 1
      for (int peer = lane(); peer < shape_.num_ranks; peer += kWarp)
        store_packet(&counts_of(peer, call_.rank())[first + expert], total);
    }
    if (blockIdx.x == 0 && threadIdx.x / kWarp == kWarps - 1) CountExchange(*this).sum_bad_indices();
    return true;
  }

  // One warp calls this.
  __device__ __noinline__ void sum_bad_indices() const {
    int32_t number = 0;
    unsigned first_inverted = 0;
#pragma unroll 1
    for (int block = lane(); block < static_cast<int>(gridDim.x); block += kWarp) {
      int32_t of_block = 0;
      int32_t inverted = 0;
      if (!wait_for(&block_counts(block)[num_experts()], call_.rank(), of_block) ||
          !wait_for(&block_counts(block)[num_experts() + 1], call_.rank(), inverted))
        break;
      number += of_block;
      first_inverted = max(first_inverted, static_cast<unsigned>(inverted));
    }
    for (int distance = 1; distance < kWarp; distance *= 2) {
      number += __shfl_xor_sync(~0u, number, distance);
      first_inverted = max(first_inverted, __shfl_xor_sync(~0u, first_inverted, distance));
    }
    if (lane() == 0) report_bad_indices(number, first_inverted);
  }
  // Returns the rank whose route has this slot.
  __device__ __noinline__ int source_of(int64_t slot) const {
    const int expert = expert_at(slot);
    int64_t before = zone_[expert];
    int source = 0;
#pragma unroll 1
    for (; source < shape_.num_ranks - 1; ++source) {
      before += count_of(source, expert);
      if (slot < before) break;
    }
    return source;
  }
};

} // namespace epx::cuda
