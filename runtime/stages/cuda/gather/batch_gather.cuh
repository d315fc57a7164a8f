// SPDX-License-Identifier: Apache-2.0
// BatchGather is the high-throughput path of combine and dispatch_bwd on few SMs, where senders have many tokens to take, in
// precision wire and by long h-tiles (LaunchPlan::next_gather). It has the warp roles of gather.cu, but a tile is a batch of
// whole tokens:
//
//   - They are looked up at the same time. A look-up is a chain of dependent loads, and takes hundreds of instructions.
//   - Their rows are read one after the other, without draining the ring in between.
//   - Their sums are signaled behind one fence, which waits until all that the SM has stored is complete. A fence for each token
//     made combine 20 % slower (docs/tuning.md).
//
// Where warps have few tokens, batches would leave some of them without work at the end, and delay what receivers wait for.
#pragma once

#include "runtime/stages/cuda/gather/gather_rows.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

// The terms of the sums of a batch of tokens. Lane t has what belongs to the sum of token t, and lane t * room + i its i-th
// term.
template <typename T>
struct TermBatch {
  int room; // SlotBatch::room_for(K)
  const T* row = nullptr;
  float weight = 1.0f;
  int size = 0; // This and the next two: see SumTerms.
  int num_inner = 0;
  int own_position = 0;

  __device__ SumTerms<T> terms_of(int token) const {
    const int term = token * room + lane();
    const int num_terms = from_lane(size, token);
    SumTerms<T> terms;
    terms.rows = {from_lane(row, term), num_terms};
    terms.weights = {from_lane(weight, term), num_terms};
    terms.num_inner = from_lane(num_inner, token);
    terms.own_position = from_lane(own_position, token);
    return terms;
  }
  // Begins to read the rows of `count` tokens from `first` on, behind a barrier of the warp: all lanes' copies come after what
  // each lane has acquired.
  __device__ LongTileReader<T> reader_of(TmaRowPipeline& pipeline, int first, int count, int64_t hidden) const {
    return {pipeline.begin_generic(), {row, size, room, first, count}, hidden};
  }
};

// Returns the terms of tokens of this rank, as Gather::terms_of_ranks does of one token: its own rows in k order, and then the
// peers' sums in rank order. Lane t * room + k passes route k of token t: whether it goes to this rank or to a peer, the rank
// ordinal there, and the row and its weight. `room` is below 32.
template <typename T>
__device__ TermBatch<T> batch_of_routes(int room, bool is_own, bool is_peer, int rank_ordinal, const T* row, float weight) {
  const int k = lane() % room;
  const unsigned lanes_of_token = ((1u << room) - 1) << (lane() - k);
  const auto count_below = [](unsigned bits, int bit) { return __popc(bits & ((1u << bit) - 1)); };
  const unsigned own = __ballot_sync(~0u, is_own ? 1 : 0) & lanes_of_token;
  unsigned peers = is_peer ? 1u << rank_ordinal : 0; // the rank ordinals of all peers that the token goes to
  for (int distance = 1; distance < room; distance *= 2)
    peers |= __shfl_xor_sync(~0u, peers, distance);
  const int num_inner = __popc(own);
  const int own_ordinal = from_lane(rank_ordinal, own != 0 ? lowest_bit(own) : lane());
  const int own_position = own != 0 ? count_below(peers, own_ordinal) : 0;

  int term = -1; // the term that the lane's route is; all routes to a peer are the same one
  if (is_own) term = count_below(own, lane());
  if (is_peer) term = num_inner + count_below(peers, rank_ordinal);
  int source = lane(); // a lane whose route is term k of the token
#pragma unroll 1
  for (int i = 0; i < room; ++i)
    if (const unsigned found = __ballot_sync(~0u, term == i ? 1 : 0) & lanes_of_token; k == i && found != 0)
      source = lowest_bit(found);

  const int first_of_token = lane() * room % kWarp;
  TermBatch<T> batch{room};
  batch.row = from_lane(row, source);
  batch.weight = from_lane(weight, source);
  batch.size = from_lane(num_inner + __popc(peers), first_of_token);
  batch.num_inner = from_lane(num_inner, first_of_token);
  batch.own_position = from_lane(own_position, first_of_token);
  return batch;
}

// Each warp has one. The rows of the call consist of long h-tiles, `rows` and `out` are aligned, and K is at most kMaxTopK.
template <typename T>
class BatchGather {
public:
  static constexpr int kMaxTopK = kWarp / 2;

  __device__ BatchGather(const GatherParams& params, const Movement& movement, TmaRowPipeline& pipeline)
      : params_(params), args_(params.call), movement_(movement), call_(movement.call()), pipeline_(pipeline),
        rows_(params, movement.call()), whole_(rows_.splits(0, rows_.num_splits())) {}

  __device__ void send(const WarpAssignment& warp) const {
    const TokenTiles tiles = tiles_of(movement_.num_peer_tokens(), warp);
#pragma unroll 1
    for (int64_t tile = warp.index; tile < tiles.count; tile = movement_.next_tile(warp, tiles.count))
      send_batch(tiles.first_token(tile), tiles.first_token(tile + 1));
  }

  __device__ void sum(const WarpAssignment& warp) const {
    const TokenTiles tiles = tiles_of(args_.num_tokens, warp);
#pragma unroll 1
    for (int64_t tile = movement_.first_tile(warp, tiles.count); tile < tiles.count;
         tile = movement_.next_tile(warp, tiles.count))
      if (!sum_batch(tiles.first_token(tile), tiles.first_token(tile + 1))) return;
  }

private:
  __device__ TokenTiles tiles_of(int64_t tokens, const WarpAssignment& warp) const {
    // With fewer tokens, larger batches leave warps without work at the end (docs/tuning.md).
    constexpr int kTokensForLargeBatches = 16, kSinglesPerWarp = 1;
    const int batch_tokens = tokens > kTokensForLargeBatches * warp.count ? SlotBatch::max_tokens(args_.top_k) : 2;
    const auto warps = static_cast<int32_t>(warp.count + warp.joining);
    return {static_cast<int32_t>(tokens), batch_tokens, kSinglesPerWarp * warps};
  }

  // Sends the sums of the tokens [first, end); see Movement::peer_token.
  __device__ void send_batch(int32_t first, int32_t end) const {
    Movement::PeerToken peer{-1, 0}; // of lane t: token t; rank -1: it has none to send
    if (first + lane() < end) peer = movement_.peer_token(static_cast<uint32_t>(first + lane()));
    if (peer.rank >= 0 && !movement_.is_active(peer.rank)) peer.rank = -1;
    const SlotBatch slots = movement_.slots_of_batch(peer);
    const int home = max(peer.rank, 0);
    const int rank_ordinal = slots.first_slot >= 0 ? movement_.rank_ordinal_of_slot(slots.first_slot) : 0;
    TermBatch<T> batch{SlotBatch::room_for(args_.top_k)};
    batch.row = rows_.row_at(args_.row_of_slot(max(slots.slot, 0)), whole_);
    batch.weight = rows_.weight_of(slots.slot);
    batch.size = slots.size;
    if (params_.weight_grads != nullptr)
      send_weight(slots.slot, from_lane(home, lane() / batch.room),
                  from_lane(static_cast<int32_t>(peer.token), lane() / batch.room));
    T* const to = rows_.staged_sum(home, peer.token, rank_ordinal, whole_);
    Epoch* const ready_flag = rows_.ready_flag_at(home, peer.token, rank_ordinal, whole_);

    LongTileReader<T> reader = batch.reader_of(pipeline_, 0, end - first, args_.hidden);
#pragma unroll 1
    for (int token = 0; token < end - first; ++token)
      if (const SumTerms<T> terms = batch.terms_of(token); terms.size() > 0)
        sum_listed_rows<false, true>(reader, terms, from_lane(to, token), args_.hidden);
    reader.end(); // a barrier of the warp: what all lanes have stored comes before the fence
    if (slots.size > 0) {
      fence_acq_rel_sys();
      for (int i = 0; i < whole_.count; ++i)
        call_.signal_behind_fence(ready_flag + i);
    }
  }
  // The lane sends the weight of a slot to the home rank of its token; -1: of none.
  __device__ void send_weight(int32_t slot, int home, int64_t token) const {
    if (slot < 0) return;
    const int64_t route = route_index(token, args_.top_k, movement_.k_of_slot(slot));
    rows_.staged_weights(home)[route] = params_.weight_grads[slot];
  }

  // Sums the rows of the tokens [first, end) of this rank. Returns false when the group has failed.
  __device__ bool sum_batch(int32_t first, int32_t end) const {
    const int room = SlotBatch::room_for(args_.top_k);
    const int32_t token = first + lane() / room; // the lane has route k of it
    const int k = lane() % room;
    const bool has_route = token < end && k < args_.top_k;
    const Route route = has_route ? movement_.route_of(token, k) : Route{-1, -1, 0};
    const int rank_ordinal = movement_.rank_ordinal_of(route.rank_ordinal);
    const bool is_live = movement_.is_live(route);
    const bool is_own = is_live && route.rank == call_.rank();
    const bool is_peer = is_live && !is_own;
    int awaited = -1; // the route's rank, if it has not been ready yet
    if (is_peer) {
      const Epoch* const ready_flag = rows_.ready_flag_at(call_.rank(), token, rank_ordinal, whole_);
      for (int i = 0; i < whole_.count; ++i)
        if (!call_.is_ready(ready_flag + i)) awaited = route.rank;
    }
    const T* const row = is_own ? rows_.row_at(args_.row_of_slot(route.slot), whole_)
                                : rows_.staged_sum(call_.rank(), token, rank_ordinal, whole_);
    const TermBatch<T> batch =
        batch_of_routes(room, is_own, is_peer, rank_ordinal, row, rows_.weight_of(is_own ? route.slot : -1));

    const bool are_ready = __all_sync(~0u, awaited < 0 ? 1 : 0) != 0;
    const int at_a_time = are_ready ? end - first : 1; // tokens whose rows are read without draining the ring
#pragma unroll 1
    for (int begin = 0; begin < end - first; begin += at_a_time) {
      if (!are_ready && !wait_for_peers(first + begin, rank_ordinal, lane() / room == begin ? awaited : -1)) return false;
      if (params_.out == nullptr) continue;
      LongTileReader<T> reader = batch.reader_of(pipeline_, begin, at_a_time, args_.hidden);
#pragma unroll 1
      for (int i = begin; i < begin + at_a_time; ++i) {
        T* const out = rows_.out(first + i, whole_);
        if (const SumTerms<T> terms = batch.terms_of(i); terms.size() > 0)
          sum_listed_rows<true, false>(reader, terms, out, args_.hidden);
        else
          zero_row(reinterpret_cast<std::byte*>(out), args_.hidden * static_cast<int64_t>(sizeof(T)));
      }
      reader.end();
    }
    if (params_.weight_grads_out != nullptr && has_route)
      rows_.collect_weight_grad(token, k, movement_.route_of(token, k), is_live); // to keep the route would take registers
    if (call_.scribbles_staging())
      for (int32_t i = first; i < end; ++i)
        rows_.scribble_staging(i, whole_);
    return true;
  }
  // The lane waits for the token's ready flags of a rank; -1: of none. Returns false, in all lanes, when the group has failed.
  __device__ bool wait_for_peers(int64_t token, int rank_ordinal, int rank) const {
    const bool ok = rank < 0 || rows_.wait_ready(token, rank_ordinal, rank, whole_);
    return __all_sync(~0u, ok ? 1 : 0) != 0; // a vote orders no memory: see reader_of()
  }

  const GatherParams& params_;
  const MovementCall& args_;
  const Movement& movement_;
  const CallSession& call_;
  TmaRowPipeline& pipeline_;
  GatherRows<T> rows_;
  RowSplits whole_; // all of a row
};

} // namespace epx::cuda
