// SPDX-License-Identifier: Apache-2.0
// The rows of a dispatch on the low-latency (LL) path: how a warp sends and receives a chunk of one. What decides about slots
// and ranks is left to the callers.
//
// A chunk leaves by st.relaxed.sys.b128 (send_chunk of ll_row.cuh) for ll_scatter_rows[parity, source, token, chunk] of the
// peer's window. There the receiver polls the lines' epochs by ld.relaxed.sys.u32 until each is the call's
// (IncomingLlChunk::wait), and then loads the lines by ld.relaxed.sys.b128. No send waits for a receiver, because the staging
// is double-buffered by the parity of the call, and while this grid runs call n no peer is still in call n - 2
// (call_session.cuh).
#pragma once

#include "runtime/stages/cuda/ll_work_partition.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/ll_chunks.cuh"
#include "runtime/stages/cuda/rows/staging.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {

// Where the low-latency path has pads to clear, the last kPadWarps warps of each CTA clear them. Their TMA row pipelines lie
// behind what the other warps have in the shared memory of their own: the descriptors that each reads for itself (enter_warp),
// or what prepare needs, and, before those pipelines, a chunk for each warp.
constexpr int kPadWarps = 4;
constexpr int64_t kLlScratchOffset =
    (kMovementWarps - kPadWarps) * TmaRowPipeline::kStagesBytes - kMovementWarps * kLlChunkBytes;
static_assert(kLlScratchOffset >= static_cast<int64_t>(kMovementWarps * sizeof(PeerDescriptors)));
// In groups of more experts prepare_dispatch of quantised rows has no low-latency path: prepare needs the shared memory.
constexpr int kMaxQuantisedLlExperts = 1024;
// The calling warp's, kLlChunkBytes.
__device__ inline std::byte* ll_scratch_of_warp() {
  return dynamic_shared_memory<std::byte>() + kLlScratchOffset + threadIdx.x / kWarp * kLlChunkBytes;
}

__host__ __device__ inline bool has_unaligned_rows(const DispatchCall& call) {
  const auto bits = [](const void* place) { return reinterpret_cast<uint64_t>(place); };
  const uint64_t rows = bits(call.tokens) | bits(call.recv_tokens);
  // Codes of so many elements are a vector.
  const int vector = static_cast<int>(kRowAlignment) << (call.format.elements == EPX_FLOAT4_E2M1 ? 1 : 0);
  const bool is_unaligned_row = call.format.is_quantised() ? is_unaligned(rows, 0) || (call.hidden & (vector - 1)) != 0
                                                           : is_unaligned(rows, row_bytes(call.dtype, call.hidden));
  return is_unaligned_row ||
         (call.sidecar_bytes > 0 && is_unaligned(bits(call.sidecar) | bits(call.recv_sidecar), call.sidecar_bytes));
}

// Each warp has one. A row of a source is that of a token, or, in the rank-major layout, has a number for each receiver.
// Chunks says what the chunks of rows are (ll_chunks.cuh).
template <typename Chunks>
class LlRows {
public:
  // `scratch` is shared memory of the warp, kLlChunkBytes, which nothing else uses meanwhile.
  __device__ LlRows(const DeviceGroup& group, const CallSession& call, const DispatchCall& args, std::byte* scratch)
      : call_(call), args_(args), staging_(group, call.parity()), chunks_(args, scratch), row_chunks_(chunks_.count()),
        num_chunks_(row_chunks_ + static_cast<uint32_t>(ll_chunks_of(args.sidecar_bytes))) {}

  // The LL chunks of a row of this call with its sidecar.
  __device__ uint32_t num_chunks() const { return num_chunks_; }
  __device__ ChunkRange range_at(uint32_t index) const {
    const bool is_sidecar = index >= row_chunks_;
    if (!Chunks::kAreCopied && !is_sidecar) return chunks_.range_at(index);
    ChunkRange range =
        Bytes::range_at(is_sidecar ? index - row_chunks_ : index, is_sidecar ? args_.sidecar_bytes : chunks_.row_bytes());
    range.chunk += is_sidecar ? staging_.first_sidecar_chunk() : 0;
    range.is_sidecar = is_sidecar;
    return range;
  }

  // Loads a chunk of a token of this rank as it travels.
  __device__ LlChunk load(int64_t token, const ChunkRange& range) const {
    if constexpr (!Chunks::kAreCopied)
      if (!range.is_sidecar) return chunks_.load(token, range);
    return Bytes::load(range.is_sidecar ? args_.sidecar : args_.tokens, token, range);
  }
  // Sends a chunk of a token to every peer of `ranks`; row_on(peer) is the number of the row there.
  template <typename RowOn>
  __device__ __forceinline__ void send(int64_t token, const ChunkRange& range, const RankMask& ranks, const LlChunk& chunk,
                                       const RowOn& row_on) const {
#pragma unroll 1
    for (int i = 0; i < call_.num_ranks() - 1; ++i)
      if (const int peer = peer_in_order(call_, token, i); ranks.contains(peer)) send_to(peer, row_on(peer), range, chunk);
  }
  // Sends a chunk to one rank, which may be this one.
  __device__ __forceinline__ void send_to(int rank, int64_t row, const ChunkRange& range, const LlChunk& chunk) const {
    send_chunk(call_, staged(rank, call_.rank(), row, range), range.bytes, chunk);
  }
  // The same where rows have the numbers of tokens.
  __device__ void send(int64_t token, const ChunkRange& range, const RankMask& ranks, const LlChunk& chunk) const {
    send(token, range, ranks, chunk, [token](int) { return token; });
  }
  // One thread sends the weight of a route to a peer.
  __device__ void send_weight_of(int peer, int64_t token, int k) const {
    send_weight(staging_.weight(peer, call_.rank(), token, k), args_.topk_weights[route_index(token, args_.top_k, k)],
                call_.epoch());
  }

  // Stores a chunk that has travelled, or might have, into a row of the receive tensors, or into those of the slots.
  __device__ __forceinline__ void store(int64_t row, const ChunkRange& range, const LlChunk& chunk) const {
    if constexpr (!Chunks::kAreCopied) {
      if (!range.is_sidecar) {
        chunks_.store(lane() == 0 ? row : -1, range, chunk);
        return;
      }
    }
    Bytes::store(range.is_sidecar ? args_.recv_sidecar : args_.recv_tokens, row, range, chunk);
  }
  __device__ void store_into(const LlSlots& slots, const ChunkRange& range, const LlChunk& chunk) const {
    if constexpr (!Chunks::kAreCopied) {
      if (!range.is_sidecar) {
        chunks_.store(slots.low, range, chunk);
        if (slots.live >> kWarp != 0) chunks_.store(slots.high, range, chunk);
        return;
      }
    }
#pragma unroll 1
    for (uint64_t left = slots.live; left != 0; left &= left - 1)
      store(slots[lowest_bit(left)], range, chunk);
  }

  // Looks at the epochs of a chunk of a peer's row once.
  __device__ IncomingLlChunk incoming(int source, int64_t row, const ChunkRange& range) const {
    return {staged(call_.rank(), source, row, range), range.bytes};
  }
  // Waits for the chunk of incoming(), and calls take(chunk). Returns false, in all lanes, when the group has failed.
  template <typename Take>
  __device__ __forceinline__ bool receive(IncomingLlChunk& incoming, int source, int64_t row, const ChunkRange& range,
                                          const Take& take) const {
    if (!incoming.wait(call_, source)) return false;
    take(incoming.get());
    if (call_.scribbles_staging()) scribble_chunk(staged(call_.rank(), source, row, range));
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
        ok = receive_weight(call_, staging_.weight(call_.rank(), source, token, k_of(first)), source, weight);
      if (ok) args_.recv_weights[slot] = weight;
    }
    return __all_sync(~0u, ok ? 1 : 0) != 0;
  }
  // Receives a chunk of a peer's token into its slots, and beside the first one the weights; stores zeros where the peer sends
  // no rows. Returns false, in all lanes, when the group has failed.
  template <typename KOf>
  __device__ bool receive_chunk(int source, int64_t token, const ChunkRange& range, const LlSlots& slots, bool sends_rows,
                                const KOf& k_of) const {
    if (sends_rows) {
      IncomingLlChunk chunk = incoming(source, token, range);
      if (!receive(chunk, source, token, range, [&](const LlChunk& data) { store_into(slots, range, data); })) return false;
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
  using Bytes = PlainChunks<Chunks::kIsUnaligned>;

  __device__ LlPacket16* staged(int receiver, int source, int64_t row, const ChunkRange& range) const {
    return staging_.chunk(receiver, source, row, range.chunk);
  }

  const CallSession& call_;
  const DispatchCall& args_;
  LlScatterStaging staging_;
  Chunks chunks_;
  uint32_t row_chunks_, num_chunks_; // of a row of this call, without and with its sidecar
};

} // namespace epx::cuda
