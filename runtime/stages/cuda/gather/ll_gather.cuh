// SPDX-License-Identifier: Apache-2.0
// This is the low-latency (LL) path of combine and dispatch_bwd, in precision wire. As in ll_dispatch.cuh, rows travel as LL
// lines into staging that exists twice, by parity of the call, so that senders need not wait for the entry barrier; and a warp
// takes a chunk of a row at a time. All warps do both steps below, unless there are many tiles: then some warps do the first
// one only, and the others the second one only (LlWorkPartition).
//
//   first  sum a chunk of a peer's token over its slots here, and       waits for nothing
//          store the sum into the home rank's staging
//   then   sum a chunk of a token of this rank over its slots here,     waits for the entry barrier, then for the LL lines
//          and add the peers' sums                                      of each peer's sum
#pragma once

#include "runtime/stages/cuda/gather/weight_grads.cuh"
#include "runtime/stages/cuda/ll_work_partition.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/ll_row.cuh"
#include "runtime/stages/cuda/rows/staging.cuh"

namespace epx::cuda {

template <typename T, bool kUnaligned, bool kRankMajor>
class LlGather {
public:
  __device__ LlGather(const GatherParams& params, Movement& movement)
      : params_(params), args_(params.call), movement_(movement), call_(movement.call()),
        staging_(params.group, movement.call().parity()), row_bytes_(args_.hidden * static_cast<int64_t>(sizeof(T))),
        chunks_(static_cast<uint32_t>(ll_chunks_of(row_bytes_))),
        tiles_to_send_(static_cast<uint32_t>(movement.ll_tokens() * (call_.num_ranks() - 1)) * chunks_),
        partition_(call_, kMovementWarps, 0, tiles_to_send_, params.role_counts.ll_senders) {}

  __device__ void send() const {
#pragma unroll 1
    for (LlTilesToSend tiles = partition_.to_send(call_, tiles_to_send_); tiles.has_tile(); tiles.finish_next()) {
      tiles.begin_next();
      const uint32_t index = tiles.tile() / chunks_;
      const Movement::PeerToken peer = movement_.peer_token(index);
      send_chunk_of(peer.rank, peer.token, tiles.tile() - index * chunks_);
    }
  }

  __device__ void sum() const {
    const auto tiles = partition_.to_receive(static_cast<uint32_t>(args_.num_tokens) * chunks_);
    bool has_entered = false;
#pragma unroll 1
    for (uint32_t tile = tiles.first; tile < tiles.end; tile += tiles.step) {
      const uint32_t token = tile / chunks_;
      const uint32_t chunk = tile - token * chunks_;
      const WarpRoutes routes = movement_.routes_of(token);
      const LlSlots own = movement_.ll_slots_here(routes);
      const LlChunk own_sum = own.live != 0 ? sum_slots(own, chunk) : LlChunk{}; // overlaps the entry barrier
      if (!has_entered && !movement_.enter_warp()) return;
      has_entered = true;
      if (!sum_chunk(token, chunk, routes, own_sum)) return;
    }
    if (!has_entered && movement_.must_enter()) movement_.enter_warp();
  }

private:
  // Asked at run time in the expert-major kernel, too, where the answer is known: without the question ptxas spills the twelve
  // words of a chunk there, and combine of 128 tokens takes 21 % longer (2 H200).
  __device__ bool is_rank_major() const {
    return kRankMajor || args_.is_rank_major();
  }
  __device__ int bytes_of(uint32_t chunk) const {
    return static_cast<int>(min(row_bytes_ - static_cast<int64_t>(chunk) * kLlChunkBytes, int64_t{kLlChunkBytes}));
  }
  __device__ LlChunk load_slot(int32_t slot, uint32_t chunk) const {
    const int64_t row = kRankMajor ? movement_.row_of_slot(slot) : args_.row_of_slot(slot);
    return load_chunk<kUnaligned>(params_.rows + row * row_bytes_ + static_cast<int64_t>(chunk) * kLlChunkBytes,
                                  bytes_of(chunk));
  }
  // Sums the rows of `slots`, of which there is at least one, in k order, and rounds once.
  __device__ LlChunk sum_slots(const LlSlots& slots, uint32_t chunk) const {
    const auto weight_of = [&](int32_t slot) {
      return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
    };
    const PerRoute<float> weights{weight_of(slots.low), weight_of(slots.high)};
    LlChunkSum<T> sum;
#pragma unroll 1
    for (uint64_t left = slots.live; left != 0;) {
      const int k = lowest_bit(left);
      left &= left - 1;
      sum.add(load_slot(slots[k], chunk), weights[k]);
    }
    return sum.rounded();
  }

  // `index`: see Movement::slots_of.
  __device__ void send_chunk_of(int home, int64_t index, uint32_t chunk) const {
    const LlSlots slots = movement_.ll_slots_of(home, index);
    if (slots.live == 0) return;
    const int32_t first_slot = slots[lowest_bit(slots.live)];
    const SlotRecord record = movement_.plan().slot_records[first_slot]; // this load overlaps those of the rows
    const LlChunk sum = sum_slots(slots, chunk);
    const int64_t token = is_rank_major() ? record.token : index;
    send_chunk(call_, staging_.chunk(home, token, movement_.rank_ordinal_of(record.rank_ordinal), chunk), bytes_of(chunk),
               sum);
    if (chunk != 0 || params_.weight_grads == nullptr) return;
    const auto send_grad = [&](int k, float grad) { send_weight(staging_.weight(home, token, k), grad, call_.epoch()); };
    if (is_rank_major())
      for_each_weight_grad(params_, movement_, first_slot, send_grad);
    else
      for (int first = 0; first < args_.top_k; first += kWarp)
        if (const int32_t slot = slots.own(first); slot >= 0) send_grad(first + lane(), params_.weight_grads[slot]);
  }

  // Adds up the ranks' partial sums, this rank's among them, in ascending rank order. Returns false when the group has failed.
  __device__ bool sum_chunk(int64_t token, uint32_t chunk, const WarpRoutes& routes, const LlChunk& own_sum) const {
    const RankMask kept_ranks = routes.ranks_of([](const Route& route) { return route.slot >= 0; });
    const int bytes = bytes_of(chunk);
    const RankMask live_ranks = routes.ranks_of([&](const Route& route) { return movement_.is_live(route); });
    if (!wait_for_peers(token, chunk, kept_ranks, live_ranks)) return false;
    // No wait from here on: the accumulators of a loop that may call something are spilled, and local memory lies in the L2
    // cache, since shared memory takes nearly all of the L1.
    // The loads of two ranks' sums are in flight together. This rank's own sum takes its turn without a load.
    LlChunkSum<T> sum;
    const auto load_sum = [&](int rank) {
      return load_lines(staging_.chunk(call_.rank(), token, kept_ranks.count_below(rank), chunk),
                        rank == call_.rank() ? 0 : bytes);
    };
#pragma unroll 1
    for (RankMask ranks = live_ranks; !ranks.is_empty();) {
      const int rank = ranks.lowest();
      ranks.remove_lowest();
      const int next = ranks.is_empty() ? call_.rank() : ranks.lowest();
      const bool has_next = !ranks.is_empty();
      ranks.remove_lowest();
      LlChunk first = load_sum(rank);
      LlChunk second = load_sum(next);
      if (rank == call_.rank()) first = own_sum;
      sum.add(first, 1.0f);
      if (has_next && next == call_.rank()) second = own_sum;
      sum.add(second, 1.0f); // +0 where there is none, which changes no sum that began at +0
    }
    if (call_.scribbles_staging()) scribble_staging(token, chunk, kept_ranks, live_ranks);
    store_chunk<kUnaligned>(params_.out + token * row_bytes_ + static_cast<int64_t>(chunk) * kLlChunkBytes, bytes,
                            sum.rounded());
    return chunk != 0 || params_.weight_grads_out == nullptr || collect_weight_grads(token);
  }

  // Waits for the chunks of all peers in `ranks`, two at a time: each half of the warp looks at those of one. Returns false, in
  // all lanes, when the group has failed.
  __device__ bool wait_for_peers(int64_t token, uint32_t chunk, const RankMask& kept_ranks, RankMask ranks) const {
    ranks.remove(call_.rank());
#pragma unroll 1
    while (!ranks.is_empty()) {
      int peer = ranks.lowest();
      ranks.remove_lowest();
      if (!ranks.is_empty() && lane() >= kWarp / 2) peer = ranks.lowest();
      ranks.remove_lowest();
      IncomingLlChunk incoming(staging_.chunk(call_.rank(), token, kept_ranks.count_below(peer), chunk), bytes_of(chunk));
      if (!incoming.wait(call_, peer)) return false;
    }
    return true;
  }

  // A test hook; see scribble_chunk().
  __device__ void scribble_staging(int64_t token, uint32_t chunk, const RankMask& kept_ranks, RankMask ranks) const {
    ranks.remove(call_.rank());
    for (; !ranks.is_empty(); ranks.remove_lowest())
      scribble_chunk(staging_.chunk(call_.rank(), token, kept_ranks.count_below(ranks.lowest()), chunk));
  }

  // Stores the gradients of the weights of a token, whose routes are loaded again, so that they take no registers before.
  // Returns false, in all lanes, when the group has failed.
  __device__ bool collect_weight_grads(int64_t token) const {
    bool ok = true;
#pragma unroll 1
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      if (k >= args_.top_k || !ok) continue;
      Route route = is_rank_major() ? movement_.kept_route(token, k) : movement_.route_of(token, k);
      if (!is_rank_major() && !movement_.is_live(route)) route.slot = -1;
      ok = collect_weight_grad<kRankMajor>(params_, movement_, token, k, route, [&](float& grad) {
        return receive_weight(call_, staging_.weight(call_.rank(), token, k), route.rank, grad);
      });
    }
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }

  const GatherParams& params_;
  const MovementCall& args_;
  Movement& movement_;
  const CallSession& call_;
  LlGatherStaging staging_;
  int64_t row_bytes_;
  uint32_t chunks_; // LL chunks of a row of this call
  uint32_t tiles_to_send_;
  LlWorkPartition partition_;
};

template <typename T, bool kUnaligned, bool kRankMajor>
__device__ void run_ll_gather(const GatherParams& params, Movement& movement) {
  if (!movement.call().begin_ll()) return;
  const LlGather<T, kUnaligned, kRankMajor> gather(params, movement);
  gather.send();
  movement.call().sent_by_warp(kMovementWarps);
  gather.sum();
}
template <typename T, bool kRankMajor>
__device__ __noinline__ void run_unaligned_ll_gather(const GatherParams& params, Movement movement) {
  run_ll_gather<T, true, kRankMajor>(params, movement);
}

// All warps of the block call this after the call descriptor is posted, in calls that take the low-latency path.
template <typename T, bool kRankMajor>
__device__ __forceinline__ void ll_gather(const GatherParams& params, Movement& movement) {
  if (is_unaligned(reinterpret_cast<uint64_t>(params.rows) | reinterpret_cast<uint64_t>(params.out),
                   params.call.hidden * static_cast<int64_t>(sizeof(T))))
    run_unaligned_ll_gather<T, kRankMajor>(params, movement);
  else
    run_ll_gather<T, false, kRankMajor>(params, movement);
}

} // namespace epx::cuda
