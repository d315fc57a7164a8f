// SPDX-License-Identifier: Apache-2.0
// This is the low-latency (LL) path of dispatch, for calls in which no rank has more than the layout's ll_tokens. The latency
// of waits dominates there, so rows travel as lines like those of NCCL's LL128 protocol: 124 bytes of data and 4 of flag, the
// epoch (ll_row.cuh). No send waits for a receiver, because the staging is double-buffered by the parity of the call, and while
// this grid runs call n no peer is still in call n - 2 (call_session.cuh). A warp takes a chunk of a row at a time.
//
//   warps         do                                                      wait for
//   copy, first   send: store a chunk of a token of this rank into the    nothing
//                 staging of each peer that the token goes to, and into
//                 its slots here
//   copy, then    receive: store a chunk of a peer's token into its       the entry barrier; then the chunk's LL lines
//                 slots. Of many tiles, some copy warps send, and
//                 the others receive from the beginning
//                 (LlWorkPartition)
//   pad           clear pads, and do nothing else; each CTA has           nothing
//                 kPadWarps of them where the alignment is above 1, unless
//                 pads are left untouched
#pragma once

#include "runtime/stages/cuda/rows/ll_rows.cuh"

namespace epx::cuda {

template <typename Chunks>
class LlDispatch {
  using Rows = LlRows<Chunks>;

public:
  __device__ LlDispatch(const MovementParams& params, Movement& movement, const DispatchCall& args)
      : params_(params), movement_(movement), call_(movement.call()), args_(args),
        rows_(params.group, movement.call(), args, ll_scratch_of_warp()) {}

  // Returns whether the calling warp is a pad warp.
  __device__ bool is_pad_warp() const { return static_cast<int>(threadIdx.x) / kWarp >= num_copy_warps(); }
  __device__ WorkPartition pad_partition() const { return partition_of_warps(num_copy_warps(), num_warps()); }
  // Returns the number of the other warps of the CTA.
  __device__ int num_copy_warps() const {
    return args_.alignment > 1 && args_.clears_pads ? num_warps() - kPadWarps : num_warps();
  }

  __device__ void send() const {
#pragma unroll 1
    for (LlTilesToSend tiles = copy_partition().to_send(call_, tiles_to_send()); tiles.has_tile(); tiles.finish_next()) {
      tiles.begin_next();
      const uint32_t token = tiles.tile() / rows_.num_chunks();
      const ChunkRange range = rows_.range_at(tiles.tile() - token * rows_.num_chunks());
      const WarpRoutes routes = movement_.routes_of(token);
      const LlChunk chunk = rows_.load(token, range);
      // Sends to every peer on which prepare assigned a slot; the receiver skips slots at or beyond its recv_rows.
      rows_.send(token, range, routes.ranks_of([](const Route& route) { return route.slot >= 0; }), chunk);
      rows_.store_into(movement_.ll_slots_here(routes), range, chunk);
      if (range.chunk == 0 && args_.topk_weights != nullptr) send_weights(token, routes);
    }
  }

  __device__ void receive() const {
    const auto tokens = static_cast<uint32_t>(movement_.ll_tokens() * (call_.num_ranks() - 1));
    const auto tiles = copy_partition().to_receive_late(tokens * rows_.num_chunks());
    bool has_entered = false;
#pragma unroll 1
    for (uint32_t tile = tiles.first; tile < tiles.end; tile += tiles.step) {
      const uint32_t index = tile / rows_.num_chunks();
      const Movement::PeerToken peer = movement_.peer_token(index);
      const LlSlots slots = movement_.ll_slots_of(peer.rank, peer.token); // the loads overlap the entry barrier
      if (slots.live == 0) continue;
      if (!has_entered && !movement_.enter_warp()) return;
      has_entered = true;
      if (!rows_.receive_chunk(peer.rank, peer.token, rows_.range_at(tile - index * rows_.num_chunks()), slots,
                               movement_.is_active(peer.rank), Rows::k_of_place))
        return;
    }
    if (!has_entered && movement_.must_enter()) movement_.enter_warp();
  }

private:
  __device__ static int num_warps() {
    return static_cast<int>(blockDim.x) / kWarp;
  }
  __device__ uint32_t tiles_to_send() const {
    return static_cast<uint32_t>(args_.num_tokens) * rows_.num_chunks();
  }
  __device__ LlWorkPartition copy_partition() const {
    return {call_, num_copy_warps(), 0, call_.num_ranks() > 1 ? tiles_to_send() : 0, params_.role_counts.ll_senders};
  }
  __device__ static WorkPartition partition_of_warps(int first, int end) {
    return partition_warps(first, end - first, 0, static_cast<int>(gridDim.x));
  }

  __device__ void send_weights(int64_t token, const WarpRoutes& routes) const {
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const Route route = routes.own(first);
      if (route.slot < 0) continue;
      if (movement_.is_live_here(route))
        args_.recv_weights[route.slot] = args_.topk_weights[route_index(token, args_.top_k, first + lane())];
      else if (route.rank != call_.rank())
        rows_.send_weight_of(route.rank, token, first + lane());
    }
  }

  const MovementParams& params_;
  Movement& movement_;
  const CallSession& call_;
  const DispatchCall& args_;
  Rows rows_;
};

} // namespace epx::cuda
