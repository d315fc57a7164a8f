// SPDX-License-Identifier: Apache-2.0
// The rows of a dispatch on the low-latency (LL) path: where their chunks lie, and how a warp sends and receives one. What
// decides about slots and ranks is left to the callers.
//
// A chunk leaves by st.relaxed.sys.b128 (send_chunk of ll_row.cuh) for ll_scatter_rows[parity, source, token, chunk] of the
// peer's window. There the receiver polls the lines' epochs by ld.relaxed.sys.u32 until each is the call's
// (IncomingLlChunk::wait), and then loads the lines by ld.relaxed.sys.b128. No send waits for a receiver, because the staging
// is double-buffered by the parity of the call, and while this grid runs call n no peer is still in call n - 2
// (call_session.cuh).
#pragma once

#include "runtime/stages/cuda/ll_work_partition.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/ll_row.cuh"

namespace epx::cuda {

// Where the low-latency path has pads to clear, the last kPadWarps warps of each CTA clear them. Their TMA row pipelines lie
// behind the descriptors that each warp reads for itself (enter_warp).
constexpr int kPadWarps = 4;
static_assert((kMovementWarps - kPadWarps) * TmaRowPipeline::kStagesBytes >= kMovementWarps * sizeof(PeerDescriptors));

__host__ __device__ inline bool has_unaligned_rows(const DispatchCall& call) {
  const auto bits = [](const void* place) { return reinterpret_cast<uint64_t>(place); };
  return is_unaligned(bits(call.tokens) | bits(call.recv_tokens), row_bytes(call.dtype, call.hidden)) ||
         (call.sidecar_bytes > 0 && is_unaligned(bits(call.sidecar) | bits(call.recv_sidecar), call.sidecar_bytes));
}

// Where the chunks and weights of rows lie. Staging has a place for each row of a source: that of a token, or, in the
// rank-major layout, of a row of the receiver.
class LlDispatchPlaces {
public:
  // Says where a chunk of a row or of its sidecar lies.
  struct ChunkRange {
    uint32_t chunk; // index in staging
    bool is_sidecar;
    int64_t row_bytes;
    int64_t first; // byte of the row or sidecar
    int bytes;
  };

  __device__ LlDispatchPlaces(const DeviceGroup& group, const CallSession& call, const DispatchCall& args)
      : group_(group), args_(args), layout_(group.context.layout), parity_(call.parity()),
        row_bytes_(row_bytes(args.dtype, args.hidden)), row_chunks_(static_cast<uint32_t>(ll_chunks_of(row_bytes_))),
        num_chunks_(row_chunks_ + static_cast<uint32_t>(ll_chunks_of(args.sidecar_bytes))) {}

  // The LL chunks of a row of this call with its sidecar.
  __device__ uint32_t num_chunks() const { return num_chunks_; }
  __device__ ChunkRange range_at(uint32_t index) const {
    const bool is_sidecar = index >= row_chunks_;
    const uint32_t chunk = is_sidecar ? index - row_chunks_ : index;
    const int64_t row_bytes = is_sidecar ? args_.sidecar_bytes : row_bytes_;
    const int64_t first = static_cast<int64_t>(chunk) * kLlChunkBytes;
    return {chunk + (is_sidecar ? static_cast<uint32_t>(layout_.ll_row_chunks) : 0), is_sidecar, row_bytes, first,
            static_cast<int>(min(row_bytes - first, int64_t{kLlChunkBytes}))};
  }

  // A chunk of a token of this rank, and of a row that it receives.
  __device__ const std::byte* token_data(const ChunkRange& range, int64_t token) const {
    return (range.is_sidecar ? args_.sidecar : args_.tokens) + token * range.row_bytes + range.first;
  }
  __device__ std::byte* recv_data(const ChunkRange& range, int64_t row) const {
    return (range.is_sidecar ? args_.recv_sidecar : args_.recv_tokens) + row * range.row_bytes + range.first;
  }
  __device__ LlPacket16* staged_chunk(int receiver, int source, int64_t row, const ChunkRange& range) const {
    return group_.window().at<LlPacket16>(receiver, layout_.ll_scatter_rows.offset) +
           ll_scatter_packet(layout_, group_.context.shape, parity_, source, row, range.chunk);
  }
  __device__ LlPacket8* staged_weight(int receiver, int source, int64_t row, int k) const {
    return group_.window().at<LlPacket8>(receiver, layout_.ll_scatter_weights.offset) +
           ll_scatter_weight(layout_, group_.context.shape, parity_, source, row, k);
  }

private:
  const DeviceGroup& group_;
  const DispatchCall& args_;
  const WindowLayout& layout_;
  int64_t parity_;
  int64_t row_bytes_;
  uint32_t row_chunks_, num_chunks_; // of a row of this call, without and with its sidecar
};

template <bool kUnaligned>
class LlDispatchRows : public LlDispatchPlaces {
public:
  __device__ LlDispatchRows(const DeviceGroup& group, const CallSession& call, const DispatchCall& args)
      : LlDispatchPlaces(group, call, args), call_(call), args_(args) {}

  // A chunk of a token of this rank.
  __device__ LlChunk load(int64_t token, const ChunkRange& range) const {
    return load_chunk<kUnaligned>(token_data(range, token), range.bytes);
  }
  // Sends a chunk to every peer of `ranks`.
  __device__ void send(int64_t token, const ChunkRange& range, const RankMask& ranks, const LlChunk& chunk) const {
#pragma unroll 1
    for (int i = 0; i < call_.num_ranks() - 1; ++i)
      if (const int peer = peer_in_order(call_, token, i); ranks.contains(peer))
        send_chunk(call_, staged_chunk(peer, call_.rank(), token, range), range.bytes, chunk);
  }
  // One thread sends the weight of a route to a peer.
  __device__ void send_weight_of(int peer, int64_t token, int k) const {
    send_weight(staged_weight(peer, call_.rank(), token, k), args_.topk_weights[route_index(token, args_.top_k, k)],
                call_.epoch());
  }
  __device__ void store_into(const LlSlots& slots, const ChunkRange& range, const LlChunk& chunk) const {
#pragma unroll 1
    for (uint64_t left = slots.live; left != 0; left &= left - 1)
      store_chunk<kUnaligned>(recv_data(range, slots[lowest_bit(left)]), range.bytes, chunk);
  }

  // Looks at the epochs of a chunk of a peer's token once.
  __device__ IncomingLlChunk incoming(int source, int64_t token, const ChunkRange& range) const {
    return {staged_chunk(call_.rank(), source, token, range), range.bytes};
  }
  // Waits for the chunk of incoming(), and stores it. Returns false when the group has failed.
  __device__ bool receive(IncomingLlChunk& incoming, int source, int64_t token, const ChunkRange& range,
                          const LlSlots& slots) const {
    if (!incoming.wait(call_, source)) return false;
    store_into(slots, range, incoming.get());
    if (call_.scribbles_staging()) scribble_chunk(staged_chunk(call_.rank(), source, token, range));
    return true;
  }
  // Stores the weights of the slots of a peer's token, zeros where it sends no rows. `k_of(first)` is the k of the lane's slot
  // among those from `first` on, which need not be in the order of k. Returns false, in all lanes, when the group has failed.
  template <typename KOf>
  __device__ bool receive_weights(int source, int64_t token, const LlSlots& slots, bool sends_rows, const KOf& k_of) const {
    bool ok = true;
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int32_t slot = slots.own(first);
      if (slot < 0) continue;
      float weight = 0.0f;
      if (sends_rows && ok)
        ok = receive_weight(call_, staged_weight(call_.rank(), source, token, k_of(first)), source, weight);
      if (ok) args_.recv_weights[slot] = weight;
    }
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }
  // Receives a chunk of a peer's token, and beside the first one the weights; stores zeros where the peer sends no rows.
  // Returns false, in all lanes, when the group has failed.
  template <typename KOf>
  __device__ bool receive_chunk(int source, int64_t token, const ChunkRange& range, const LlSlots& slots, bool sends_rows,
                                const KOf& k_of) const {
    if (sends_rows) {
      IncomingLlChunk chunk = incoming(source, token, range);
      if (!receive(chunk, source, token, range, slots)) return false;
    } else {
      store_into(slots, range, LlChunk{});
    }
    return range.chunk != 0 || args_.recv_weights == nullptr || receive_weights(source, token, slots, sends_rows, k_of);
  }
  // The k of a slot where slots lie by k.
  __device__ static int k_of_place(int first) {
    return first + lane();
  }

private:
  const CallSession& call_;
  const DispatchCall& args_;
};

} // namespace epx::cuda
