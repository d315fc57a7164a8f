// SPDX-License-Identifier: Apache-2.0
// The routing all-gather: prepare when the routes of every rank are few enough to be exchanged, so that each rank computes the
// slots of all ranks. See prepare.cu.
#pragma once

#include "runtime/stages/cuda/prepare/slot_assignment.cuh"

namespace epx::cuda {

class RoutingAllGather : public SlotAssignment<RoutingAllGather> {
public:
  static constexpr bool kWritesLocally = true;

  __device__ explicit RoutingAllGather(const PrepareCta& cta)
      : SlotAssignment(cta),
        gathered_experts_(reinterpret_cast<int16_t*>(warp_base_ + kWarps * num_experts() + kMaxPrepareBlocks)) {}

  __device__ void publish_routes() const {
    const auto routes = static_cast<uint32_t>(args_.num_tokens * args_.top_k);
    const uint32_t packets = routes * static_cast<uint32_t>(shape_.num_ranks);
#pragma unroll 1
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < packets; i += gridDim.x * kThreads) {
      const uint32_t peer = i / routes;
      const uint32_t route = i - peer * routes;
      store_packet(routes_of(static_cast<int>(peer), call_.rank()) + route, expert_of(route));
    }
    clear_counts();
    if (!is_leader_cta()) return; // the leader CTA reports bad indices, unless the count exchange does
    clear_bad_indices();
#pragma unroll 1
    for (uint32_t route = threadIdx.x; route < routes; route += kThreads)
      if (expert_of(route) < 0) bad_indices().add(route, index_at(route));
  }

  // Computes next_, demand_ and zone_ behind the entry barrier. Returns false, the same in all threads, when the group has
  // failed.
  __device__ bool count() {
    if (static_cast<int>(threadIdx.x) <= shape_.num_ranks) {
      int32_t tokens = 0;
#pragma unroll 1
      for (int rank = 0; rank < static_cast<int>(threadIdx.x); ++rank)
        tokens += tokens_of(rank);
      first_token()[threadIdx.x] = tokens;
    }
    if (const int32_t tokens = max_tokens(); tokens <= group_.context.layout.ll_tokens) ll_tokens_ = tokens;
    __syncthreads();
    partition(first_token()[shape_.num_ranks], max(gridDim.x - 1, 1u));
    const int begin = static_cast<int>(begin_) * args_.top_k;
    const auto take = [&](int source, int route, int expert) {
      gathered_experts_[route] = static_cast<int16_t>(expert);
      if (expert < 0) return;
      atomicAdd(&demand_[expert], 1);
      if (route < begin) atomicAdd(&next_[expert], 1);
      if (is_leader_cta() && source <= call_.rank())
        atomicAdd(&(source < call_.rank() ? counts_before_own() : own_counts())[expert], 1);
    };
    if (__syncthreads_and(take_all_routes(take) ? 1 : 0) == 0) return false;
    find_zones();
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads) {
      next_[e] += zone_[e];
      if (is_leader_cta()) count_dropped(zone_[e] + counts_before_own()[e], own_counts()[e]);
    }
    __syncthreads();
    return true;
  }

  // `token` is a token's number among the tokens of all ranks, here and below.
  __device__ Origin origin_of(int64_t token) const {
    int rank = 0;
    while (first_token()[rank + 1] <= token)
      ++rank;
    return {rank, token - first_token()[rank]};
  }
  using PrepareCta::expert_of;
  __device__ int expert_of(int64_t token, int k) const {
    return gathered_experts_[token * args_.top_k + k];
  }
  __device__ void put_slot(const Origin& origin, int k, int32_t rank, int32_t slot) const {
    if (ll_tokens() > 0)
      plan_.ll_slots[(origin.rank * group_.context.layout.ll_tokens + origin.token) * args_.top_k + k] =
          rank == call_.rank() ? slot : -1;
  }
  __device__ void put_no_slots(const Origin& origin) const {
    if (origin.token >= ll_tokens()) return; // movements do not read ll_slots beyond it
#pragma unroll 1
    for (int k = 0; k < args_.top_k; ++k)
      put_slot(origin, k, -1, -1);
  }
  __device__ void put_record(int rank, int32_t slot, SlotRecord record) const {
    if (rank == call_.rank()) write_record(slot, record);
  }
  __device__ void put_first_slot(int, int64_t index, int32_t first_slot) const {
    plan_.first_slots[index] = first_slot;
  }
  // The leader CTA has no tokens to assign, unless it is the only block.
  __device__ bool is_leader_cta() const {
    return blockIdx.x == gridDim.x - 1;
  }
  // Returns the number of tokens of the rank that has the most, or 0 when the low-latency path is not taken.
  __device__ int32_t ll_tokens() const {
    return ll_tokens_;
  }
  __device__ void deliver_global_counts() const {
#pragma unroll 1
    for (int rank = static_cast<int>(blockIdx.x); rank < shape_.num_ranks; rank += static_cast<int>(gridDim.x)) {
      __syncthreads(); // next_ is no longer used
#pragma unroll 1
      for (int e = threadIdx.x; e < num_experts(); e += kThreads)
        next_[e] = 0;
      __syncthreads();
#pragma unroll 1
      for (int route = first_token()[rank] * args_.top_k + threadIdx.x; route < first_token()[rank + 1] * args_.top_k;
           route += kThreads)
        if (gathered_experts_[route] >= 0) atomicAdd(&next_[gathered_experts_[route]], 1);
      __syncthreads();
#pragma unroll 1
      for (int e = threadIdx.x; e < num_experts(); e += kThreads)
        store_count(args_.global_counts, static_cast<int64_t>(rank) * num_experts() + e, next_[e]);
    }
  }

private:
  // [P + 1]: the number of each rank's first token among the tokens of all ranks, and the number of all tokens.
  __device__ static int32_t* first_token() {
    __shared__ int32_t first[kMaxDeviceRanks + 1];
    return first;
  }
  // The LL packets of the experts of `source`'s routes, in the window of `owner`.
  __device__ LlPacket8* routes_of(int owner, int source) const {
    const int64_t row = call_.parity() * shape_.num_ranks + source;
    return group_.window().at<LlPacket8>(owner, group_.context.layout.gathered_routes.offset) +
           row * group_.context.layout.gathered_routes_per_rank;
  }

  // In count() the leader CTA counts this rank's routes [E], and those of the ranks before it [E]. clear_counts() zeroes them
  // before the entry barrier.
  __device__ int32_t* own_counts() const {
    return warp_base_;
  }
  __device__ int32_t* counts_before_own() const {
    return warp_base_ + num_experts();
  }
  __device__ void clear_counts() const {
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      demand_[e] = next_[e] = own_counts()[e] = counts_before_own()[e] = 0;
  }
  // The LL packet of a route.
  struct GatheredRoute {
    const LlPacket8* place;
    LlPacket8 packet;
    int source;
  };
  // All threads of a block together call take(source, route among those of all ranks, expert) once for each route of all ranks.
  // Returns false when the group has failed.
  template <typename Take>
  __device__ bool take_all_routes(const Take& take) const {
    constexpr int kBatch = 4; // loads that a thread has in flight together
    const int routes = first_token()[shape_.num_ranks] * args_.top_k;
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
        for (int end; (end = first_token()[source + 1] * args_.top_k) <= route; ++source)
          first_of_source = end;
        const LlPacket8* const place = routes_of(call_.rank(), source) + (route - first_of_source);
        gathered[i] = {place, load_packet_relaxed_sys(place), source};
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (gathered[i].place == nullptr) continue;
        int32_t expert = gathered[i].packet.value;
        if (gathered[i].packet.epoch != call_.epoch() && !wait_for(gathered[i].place, gathered[i].source, expert))
          return false;
        // The value may be anything, and it becomes an index.
        if (static_cast<uint32_t>(expert) >= static_cast<uint32_t>(num_experts())) expert = -1;
        take(gathered[i].source, first + i * kThreads, expert);
      }
    }
    return true;
  }

  int16_t* gathered_experts_; // the experts of the routes of all ranks
  int32_t ll_tokens_ = 0;
};

} // namespace epx::cuda
