// SPDX-License-Identifier: Apache-2.0
// Row assignment: each token of this rank gets its row on each rank that it goes to, which is the number of earlier tokens that
// go there. A block assigns the rows of its own range of tokens, and the last block that sends knows the totals.
//
//   count   A thread takes a token of the range, and a warp adds up its 32 tokens by votes, one for each rank.
//   share   The block tells the others how many tokens of its range go to each rank, and adds up what the blocks before it tell.
//   assign  A thread takes a route. The block walks its range in tiles of kMovementThreads / K tokens, as prepare does
//           (slot_assignment.cuh), and sorts the first routes of each (token, rank) by rank, stably.
#pragma once

#include "base/device/warp.cuh"
#include "runtime/layout/rank_major.h"
#include "runtime/stages/cuda/bad_indices.cuh"
#include "runtime/stages/cuda/expert_ranks.cuh"
#include "runtime/stages/cuda/protocol/plan_parts.cuh"
#include "runtime/stages/stages.h"

namespace epx::cuda {

// The shared memory of a block.
struct RowAssignmentShared {
  static constexpr int kWarps = kMovementThreads / kWarp;

  BadIndices bad;                   // of the range and, once they are shared, of the ranges before it
  int32_t counted[kMaxDeviceRanks]; // by rank: tokens of the range that go there
  int32_t rows[kMaxDeviceRanks];    // by rank: tokens before the tile that go there
  int32_t dropped[kMaxDeviceRanks]; // by rank: routes of the tiles whose row is at or above M
  int32_t warp_rows[kWarps][kMaxDeviceRanks];
  int32_t tile_ranks[kMovementThreads]; // of the tile's routes; -1: masked
  int32_t tile_rows[kMovementThreads];  // -1: no first route of a token to its rank
};

class RowAssignment {
public:
  __device__ RowAssignment(const DispatchRankMajorCall& args, const ExpertRanks& experts, int num_ranks,
                           RowAssignmentShared& shared)
      : args_(args), experts_(experts), num_ranks_(num_ranks), shared_(shared) {}

  // All threads of the block call this first. A barrier must follow before anything else.
  __device__ void clear() const {
    for (int i = static_cast<int>(threadIdx.x); i < RowAssignmentShared::kWarps * kMaxDeviceRanks; i += kMovementThreads)
      shared_.warp_rows[i / kMaxDeviceRanks][i % kMaxDeviceRanks] = 0;
    if (threadIdx.x < kMaxDeviceRanks)
      shared_.counted[threadIdx.x] = shared_.rows[threadIdx.x] = shared_.dropped[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared_.bad = {0, 0};
  }

  // Counts the tokens [begin, end), and bad indices among theirs. All threads of the block call this; a barrier must follow.
  __device__ void count(uint32_t begin, uint32_t end) const {
    constexpr int kLoads = 8;
    int32_t low = 0, high = 0; // of the ranks `lane` and 32 + `lane`
#pragma unroll 1
    for (uint32_t first = begin; first < end; first += kMovementThreads) {
      const uint32_t token = first + threadIdx.x;
      RankMask ranks;
#pragma unroll 1
      for (int first_k = 0; first_k < args_.top_k; first_k += kLoads) {
        const uint32_t route = token * static_cast<uint32_t>(args_.top_k) + static_cast<uint32_t>(first_k);
        int64_t indices[kLoads]; // whose loads are in flight at a time
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          indices[i] = token < end && first_k + i < args_.top_k ? index_at(args_, route + i) : -1;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (is_expert(indices[i]))
            ranks.set(experts_.rank_of(static_cast<int>(indices[i])));
          else if (indices[i] != -1)
            count_bad_index(shared_.bad, route + i);
        }
      }
#pragma unroll 1
      for (int rank = 0; rank < num_ranks_; ++rank) {
        const int32_t rows = __popc(__ballot_sync(~0u, ranks.contains(rank) ? 1 : 0));
        if (rank % kWarp == lane()) (rank < kWarp ? low : high) += rows;
      }
    }
    if (low != 0) atomicAdd(&shared_.counted[lane()], low);
    if (high != 0) atomicAdd(&shared_.counted[kWarp + lane()], high);
  }

  // Tells the other blocks what this one has counted, and adds what the blocks before it have counted to rows. All threads of the
  // block call this behind a barrier; it ends with one. Returns false, in all threads, when the group has failed.
  __device__ bool share(const DeviceGroup& group, const CallSession& call) const {
    constexpr int kLoads = 2; // packets of a thread that are in flight at a time
    const auto thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
    const BadIndices bad = shared_.bad;
    call.delay();
    __syncthreads(); // all have read what is bad here, to which the blocks before this one are added now
    if (thread < num_ranks_)
      store_packet_relaxed_sys(plan_part_packet(group, block, thread),
                               LlPacket16{{bad.first_inverted, static_cast<uint32_t>(bad.number),
                                           static_cast<uint32_t>(shared_.counted[thread])},
                                          call.epoch()});
    const int packets = block * num_ranks_;
    const LlPacket16* const first = plan_part_packet(group, 0, 0);
    bool ok = true;
#pragma unroll 1
    for (int from = thread; from < packets; from += kLoads * kMovementThreads) {
      LlPacket16 loaded[kLoads]{};
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (from + i * kMovementThreads < packets) loaded[i] = load_packet_relaxed_sys(first + from + i * kMovementThreads);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int index = from + i * kMovementThreads;
        if (index >= packets) break;
        ok = ok && call.wait_for_loaded_packet(first + index, loaded[i], call.rank());
        const int rank = index % num_ranks_;
        if (const auto rows = static_cast<int32_t>(loaded[i].values[2]); rows != 0) atomicAdd(&shared_.rows[rank], rows);
        if (const auto number = static_cast<int32_t>(loaded[i].values[1]); rank == 0 && number != 0) {
          atomicAdd(&shared_.bad.number, number);
          atomicMax(&shared_.bad.first_inverted, loaded[i].values[0]);
        }
      }
    }
    return __syncthreads_and(ok ? 1 : 0) != 0;
  }

  // Calls take(token, k, route) for each route of the tokens [begin, end), and adds those tokens to rows. The slot of the route
  // is as in handle memory. All threads of the block call this behind a barrier; where there are tokens it ends with one.
  template <typename Take>
  __device__ void assign(uint32_t begin, uint32_t end, int rank_of_source, const Take& take) const {
    const auto top_k = static_cast<uint32_t>(args_.top_k);
    const uint32_t tile_tokens = kMovementThreads / top_k;
    const uint32_t token_in_tile = threadIdx.x / top_k;
    const uint32_t k = threadIdx.x - token_in_tile * top_k;
    const int32_t* const ranks = shared_.tile_ranks + (threadIdx.x - k); // [K]: the token's
    const int32_t* const rows = shared_.tile_rows + (threadIdx.x - k);
#pragma unroll 1
    for (; begin < end; begin += tile_tokens) {
      const uint32_t token = begin + token_in_tile;
      const bool has_route = token_in_tile < tile_tokens && token < end;
      const int64_t index = has_route ? index_at(args_, token * top_k + k) : -1;
      const int rank = is_expert(index) ? experts_.rank_of(static_cast<int>(index)) : -1;
      shared_.tile_ranks[threadIdx.x] = rank;
      __syncthreads();
      uint32_t first_k = 0; // the token's first route to the same rank
#pragma unroll 1
      while (first_k < k && ranks[first_k] != rank)
        ++first_k;
      const int key = first_k == k ? rank : -1;
      const unsigned same = __match_any_sync(~0u, key);
      const unsigned lower = same & ((1u << lane()) - 1);
      const auto warp = static_cast<int>(threadIdx.x) / kWarp;
      if (key >= 0 && lower == 0) shared_.warp_rows[warp][key] = __popc(same);
      __syncthreads();
      int32_t row = -1;
      if (key >= 0) {
        row = shared_.rows[key] + __popc(lower);
#pragma unroll 1
        for (int before = 0; before < warp; ++before)
          row += shared_.warp_rows[before][key];
      }
      shared_.tile_rows[threadIdx.x] = row;
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < num_ranks_)
#pragma unroll 1
        for (auto& rows_of_warp : shared_.warp_rows) {
          shared_.rows[threadIdx.x] += rows_of_warp[threadIdx.x];
          rows_of_warp[threadIdx.x] = 0;
        }
      if (has_route)
        take(token, static_cast<int>(k), route_of(rank_of_source, rank, rows[first_k], first_k == k, ranks, rows));
      __syncthreads();
    }
  }

private:
  __device__ bool is_expert(int64_t index) const {
    return index >= 0 && index < experts_.blocks.num_experts;
  }
  // `row` is that of the token on `rank`; ranks and rows [K] are those of the token's routes.
  __device__ Route route_of(int source, int rank, int32_t row, bool is_first, const int32_t* ranks,
                            const int32_t* rows) const {
    if (rank < 0) return {-1, -1, 0};
    if (row >= args_.rows_per_source) {
      atomicAdd(&shared_.dropped[rank], 1);
      return {-1, -1, 0};
    }
    int32_t rank_ordinal = 0;
#pragma unroll 1
    for (int k = 0; k < args_.top_k; ++k)
      if (rows[k] >= 0 && rows[k] < args_.rows_per_source && ranks[k] < rank) ++rank_ordinal;
    const auto slot = static_cast<int32_t>(source * args_.slots_per_source + row);
    return {encode_slot(slot, is_first), rank, rank_ordinal};
  }

  const DispatchRankMajorCall& args_;
  const ExpertRanks& experts_;
  int num_ranks_;
  RowAssignmentShared& shared_;
};

} // namespace epx::cuda
