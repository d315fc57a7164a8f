// SPDX-License-Identifier: Apache-2.0
// This is the low-latency (LL) path of dispatch, for calls in which no rank has more than max_ll_tokens() tokens. The latency
// of waits dominates there, so rows travel as packets like those of NCCL's LL protocol: 12 bytes of data and 4 of flag, the
// epoch. No send waits for a receiver, because the staging is double-buffered by the parity of the call, and while this grid
// runs call n no peer is still in call n - 2 (call_session.cuh). A warp takes a chunk of a row at a time.
//
//   warps         do                                                      wait for
//   copy, first   send: store a chunk of a token of this rank into the    nothing
//                 staging of each peer that the token goes to, and into
//                 its slots here
//   copy, then    receive: store a chunk of a peer's token into its       the entry barrier; then the chunk's LL packets
//                 slots
//   pad           clear pads, and do nothing else; each CTA has           nothing
//                 kPadWarps of them where the alignment is above 1, unless
//                 pads are left untouched
//
// A chunk leaves by st.relaxed.sys.b128 (send_chunk of ll_row.cuh) for ll_scatter_rows[parity, source, token, chunk] of the
// peer's window. There the receive polls it by ld.relaxed.sys.b128 until each packet has the call's epoch
// (IncomingLlChunk::wait).
#pragma once

#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/ll_row.cuh"

namespace epx::cuda {

template <bool kUnaligned>
class LlDispatch {
  // Says where a chunk of a row or of its sidecar lies.
  struct ChunkRange {
    uint32_t chunk; // index in staging
    bool is_sidecar;
    int64_t row_bytes;
    int64_t first; // byte of the row or sidecar
    int bytes;
  };

public:
  __device__ LlDispatch(const DeviceGroup& group, Movement& movement, const DispatchCall& args)
      : group_(group), movement_(movement), call_(movement.call()), args_(args), layout_(group.context.layout),
        row_bytes_(row_bytes(args.dtype, args.hidden)), row_chunks_(static_cast<uint32_t>(ll_chunks_of(row_bytes_))),
        chunks_(row_chunks_ + static_cast<uint32_t>(ll_chunks_of(args.sidecar_bytes))) {}

  // Returns whether the calling warp is a pad warp.
  __device__ bool is_pad_warp() const { return static_cast<int>(threadIdx.x) / kWarp >= num_copy_warps(); }
  __device__ WorkPartition pad_partition() const { return partition_of_warps(num_copy_warps(), num_warps()); }
  // Returns the number of the other warps of the CTA.
  __device__ int num_copy_warps() const {
    return args_.alignment > 1 && args_.clears_pads ? num_warps() - kPadWarps : num_warps();
  }

  __device__ void send() const {
    const WorkPartition partition = copy_partition();
    const auto tiles = static_cast<uint32_t>(args_.num_tokens) * chunks_;
#pragma unroll 1
    for (auto tile = static_cast<uint32_t>(partition.index); tile < tiles; tile += static_cast<uint32_t>(partition.count)) {
      const uint32_t token = tile / chunks_;
      const ChunkRange range = range_at(tile - token * chunks_);
      const WarpRoutes routes = movement_.routes_of(token);
      const LlChunk chunk = load_chunk<kUnaligned>(source_of(range) + token * range.row_bytes + range.first, range.bytes);
      send_to_peers(token, range, routes, chunk);
      store_into(movement_.ll_slots_here(routes), range, chunk);
      if (range.chunk == 0 && args_.topk_weights != nullptr) send_weights(token, routes);
    }
  }

  __device__ void receive() const {
    const WorkPartition partition = copy_partition();
    const auto tokens = static_cast<uint32_t>(movement_.ll_tokens() * (call_.num_ranks() - 1));
    bool has_entered = false;
#pragma unroll 1
    for (auto tile = static_cast<uint32_t>(partition.rotated_index());; tile += static_cast<uint32_t>(partition.count)) {
      const uint32_t index = tile / chunks_;
      if (index >= tokens) break;
      const Movement::PeerToken peer = movement_.peer_token(index);
      const LlSlots slots = movement_.ll_slots_of(peer.rank, peer.token); // the loads overlap the entry barrier
      if (slots.live == 0) continue;
      if (!has_entered && !movement_.enter_warp()) return;
      has_entered = true;
      if (!receive_chunk(peer.rank, peer.token, range_at(tile - index * chunks_), slots)) return;
    }
    if (!has_entered && movement_.must_enter()) movement_.enter_warp();
  }

private:
  __device__ ChunkRange range_at(uint32_t index) const {
    const bool is_sidecar = index >= row_chunks_;
    const uint32_t chunk = is_sidecar ? index - row_chunks_ : index;
    const int64_t row_bytes = is_sidecar ? args_.sidecar_bytes : row_bytes_;
    const int64_t first = static_cast<int64_t>(chunk) * kLlChunkBytes;
    return {chunk + (is_sidecar ? static_cast<uint32_t>(layout_.ll_row_chunks) : 0), is_sidecar, row_bytes, first,
            static_cast<int>(min(row_bytes - first, int64_t{kLlChunkBytes}))};
  }
  __device__ const std::byte* source_of(const ChunkRange& range) const {
    return range.is_sidecar ? args_.sidecar : args_.tokens;
  }
  __device__ std::byte* slot_data(const ChunkRange& range, int64_t slot) const {
    return (range.is_sidecar ? args_.recv_sidecar : args_.recv_tokens) + slot * range.row_bytes + range.first;
  }
  __device__ LlPacket16* staged_chunk(int receiver, int source, int64_t token, const ChunkRange& range) const {
    return group_.window().at<LlPacket16>(receiver, layout_.ll_scatter_rows.offset) +
           ll_scatter_packet(layout_, group_.context.shape, call_.parity(), source, token, range.chunk);
  }
  __device__ LlPacket8* staged_weight(int receiver, int source, int64_t token, int k) const {
    return group_.window().at<LlPacket8>(receiver, layout_.ll_scatter_weights.offset) +
           ll_scatter_weight(layout_, group_.context.shape, call_.parity(), source, token, k);
  }

  static constexpr int kPadWarps = 4;
  __device__ static int num_warps() {
    return static_cast<int>(blockDim.x) / kWarp;
  }
  __device__ WorkPartition copy_partition() const {
    return partition_of_warps(0, num_copy_warps());
  }
  __device__ static WorkPartition partition_of_warps(int first, int end) {
    return partition_warps(first, end - first, 0, static_cast<int>(gridDim.x));
  }

  // Sends to every peer on which prepare assigned a slot; the receiver skips slots at or beyond its recv_rows.
  __device__ void send_to_peers(int64_t token, const ChunkRange& range, const WarpRoutes& routes,
                                const LlChunk& chunk) const {
    const RankMask ranks = routes.ranks_of([](const Route& route) { return route.slot >= 0; });
#pragma unroll 1
    for (int i = 0; i < call_.num_ranks() - 1; ++i)
      if (const int peer = movement_.peer_in_order(token, i); ranks.contains(peer))
        send_chunk(staged_chunk(peer, call_.rank(), token, range), range.bytes, chunk, call_.epoch());
  }
  __device__ void send_weights(int64_t token, const WarpRoutes& routes) const {
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const Route route = routes.own(first);
      if (route.slot < 0) continue;
      const float weight = args_.topk_weights[route_index(token, args_.top_k, first + lane())];
      if (movement_.is_live_here(route))
        args_.recv_weights[route.slot] = weight;
      else if (route.rank != call_.rank())
        send_weight(staged_weight(route.rank, call_.rank(), token, first + lane()), weight, call_.epoch());
    }
  }

  __device__ void store_into(const LlSlots& slots, const ChunkRange& range, const LlChunk& chunk) const {
#pragma unroll 1
    for (uint64_t left = slots.live; left != 0; left &= left - 1)
      store_chunk<kUnaligned>(slot_data(range, slots[lowest_bit(left)]), range.bytes, chunk);
  }

  // Returns false when the group has failed.
  __device__ bool receive_chunk(int source, int64_t token, const ChunkRange& range, const LlSlots& slots) const {
    const bool is_active = movement_.is_active(source);
    LlPacket16* const staged = staged_chunk(call_.rank(), source, token, range);
    LlChunk chunk{};
    if (is_active) {
      IncomingLlChunk incoming(staged, range.bytes);
      if (!incoming.wait(call_, source)) return false;
      chunk = incoming.get();
    }
    store_into(slots, range, chunk);
    if (call_.scribbles_staging()) scribble_chunk(staged);
    return range.chunk != 0 || args_.recv_weights == nullptr || receive_weights(source, token, slots, is_active);
  }
  // Returns false, in all lanes, when the group has failed.
  __device__ bool receive_weights(int source, int64_t token, const LlSlots& slots, bool is_active) const {
    bool ok = true;
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int32_t slot = slots.own(first);
      if (slot < 0) continue;
      float weight = 0.0f;
      if (is_active && ok)
        ok = receive_weight(call_, staged_weight(call_.rank(), source, token, first + lane()), source, weight);
      if (ok) args_.recv_weights[slot] = weight;
    }
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }

  const DeviceGroup& group_;
  Movement& movement_;
  const CallSession& call_;
  const DispatchCall& args_;
  const WindowLayout& layout_;
  int64_t row_bytes_;
  uint32_t row_chunks_, chunks_; // LL chunks of a row of this call, without and with its sidecar
};

} // namespace epx::cuda
