// Rows of few tokens on their way. A warp has a chunk of a row in its registers; between ranks it travels as words that
// tell of themselves (LlPacket16): nobody waits for a store to be complete before telling of it, and nobody has to be
// told.
#pragma once

#include <bit>
#include <cmath>

#include "base/device/warp.cuh"
#include "runtime/stages/cuda/protocol/call_session.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

// What a lane has of a chunk: vectors lane, lane + 32 and lane + 64. On their way their words are in four tagged words:
// those at lane, lane + 32, lane + 64 and lane + 96.
struct LlChunk {
  static constexpr int kVectors = kLlChunkBytes / (kWarp * sizeof(uint4));
  static constexpr int kTriples = kLlChunkPackets / kWarp;
  static constexpr int kWords = kVectors * sizeof(uint4) / sizeof(uint32_t);
  static_assert(kWords == 3 * kTriples);

  uint32_t words[kWords];

  // Of the lane's vectors and tagged words those that `bytes` bytes take, 1 <= bytes <= kLlChunkBytes: the first so many.
  __device__ static int vectors_of(int bytes) {
    constexpr int kEach = kWarp * sizeof(uint4);
    static_assert(kVectors * kEach == kLlChunkBytes);
    return static_cast<int>(static_cast<unsigned>(bytes - lane() * static_cast<int>(sizeof(uint4)) + kEach - 1) / kEach);
  }
  __device__ static int triples_of(int bytes) {
    const int vectors = vectors_of(bytes);
    return vectors == 0 ? 0 : vectors + 1;
  }
};

// Byte by byte. `words`: the lane's.
__device__ __noinline__ inline void load_unaligned_chunk(const std::byte* from, int bytes, uint32_t* words) {
  for (int vector = 0; vector < LlChunk::kVectors; ++vector) {
    const int first = (vector * kWarp + lane()) * static_cast<int>(sizeof(uint4));
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(sizeof(uint4)) && first + i < bytes; ++i)
      words[vector * 4 + i / 4] |= static_cast<uint32_t>(from[first + i]) << 8 * (i % 4);
  }
}
__device__ __noinline__ inline void store_unaligned_chunk(std::byte* to, int bytes, const uint32_t* words) {
  for (int vector = 0; vector < LlChunk::kVectors; ++vector) {
    const int first = (vector * kWarp + lane()) * static_cast<int>(sizeof(uint4));
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(sizeof(uint4)) && first + i < bytes; ++i)
      to[first + i] = static_cast<std::byte>(words[vector * 4 + i / 4] >> 8 * (i % 4));
  }
}
// All lanes. `bytes` of the chunk, up to kLlChunkBytes; what it does not have is zero. kUnaligned: see is_unaligned().
template <bool kUnaligned>
__device__ inline LlChunk load_chunk(const std::byte* from, int bytes) {
  LlChunk chunk{};
  if constexpr (kUnaligned) {
    load_unaligned_chunk(from, bytes, chunk.words);
    return chunk;
  }
  const int vectors = LlChunk::vectors_of(bytes);
#pragma unroll
  for (int i = 0; i < LlChunk::kVectors; ++i) {
    if (i >= vectors) continue;
    const uint4 vector = reinterpret_cast<const uint4*>(from)[i * kWarp + lane()];
    memcpy(chunk.words + 4 * i, &vector, sizeof(vector));
  }
  return chunk;
}
template <bool kUnaligned>
__device__ inline void store_chunk(std::byte* to, int bytes, const LlChunk& chunk) {
  if constexpr (kUnaligned) {
    store_unaligned_chunk(to, bytes, chunk.words);
    return;
  }
  const int vectors = LlChunk::vectors_of(bytes);
#pragma unroll
  for (int i = 0; i < LlChunk::kVectors; ++i) {
    if (i >= vectors) continue;
    uint4 vector;
    memcpy(&vector, chunk.words + 4 * i, sizeof(vector));
    reinterpret_cast<uint4*>(to)[i * kWarp + lane()] = vector;
  }
}

// To a place in a rank's window.
__device__ inline void send_chunk(LlPacket16* to, int bytes, const LlChunk& chunk, Epoch epoch) {
  const int triples = LlChunk::triples_of(bytes);
#pragma unroll
  for (int i = 0; i < LlChunk::kTriples; ++i)
    if (i < triples)
      store_packet_relaxed_sys(to + i * kWarp + lane(),
                               LlPacket16{{chunk.words[3 * i], chunk.words[3 * i + 1], chunk.words[3 * i + 2]}, epoch});
}
// Tests: once it has been used.
__device__ inline void scribble_chunk(LlPacket16* place) {
  __syncwarp(); // all lanes have read it
#pragma unroll
  for (int i = 0; i < LlChunk::kTriples; ++i)
    store_packet_relaxed_sys(place + i * kWarp + lane(), LlPacket16{{0x5a5a5a5a, 0x5a5a5a5a, 0x5a5a5a5a}, 0x5a5a5a5a});
}

// A chunk on its way to this rank, as far as it has been seen.
class IncomingLlChunk {
public:
  // Begins to look. All lanes.
  __device__ IncomingLlChunk(const LlPacket16* place, int bytes) : place_(place), triples_(LlChunk::triples_of(bytes)) {
    look();
  }

  // Until it is here. `peer` sends it. False: the group has failed. All lanes.
  __device__ bool wait(const CallSession& call, int peer) {
    const Epoch epoch = call.epoch();
#pragma unroll 1
    while (true) {
      const LlPacket16* missing = nullptr; // of the lane
#pragma unroll
      for (int i = 0; i < LlChunk::kTriples; ++i)
        if (i < triples_ && words_[i].epoch != epoch) missing = place_ + i * kWarp + lane();
      const unsigned lanes = __ballot_sync(~0u, missing != nullptr ? 1 : 0);
      if (lanes == 0) return true;
      bool ok = true;
      LlPacket16 word;
      if (lane() == lowest_bit(lanes)) ok = call.wait_for_word(missing, word, peer); // one, lest all poll
      if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
      look();
    }
  }
  // Once it is here.
  __device__ LlChunk get() const {
    LlChunk chunk;
#pragma unroll
    for (int i = 0; i < LlChunk::kWords; ++i)
      chunk.words[i] = i / 3 < triples_ ? words_[i / 3].values[i % 3] : 0;
    return chunk;
  }

private:
  __device__ void look() {
#pragma unroll
    for (int i = 0; i < LlChunk::kTriples; ++i)
      if (i < triples_) words_[i] = load_packet_relaxed_sys(place_ + i * kWarp + lane());
  }

  const LlPacket16* place_;
  int triples_;
  LlPacket16 words_[LlChunk::kTriples] = {};
};

// ---- Weights that go with rows, likewise: as the bits of floats ----

// To a place in a rank's window.
__device__ inline void send_weight(LlPacket8* to, float weight, Epoch epoch) {
  store_packet_relaxed_sys(to, LlPacket8{std::bit_cast<int32_t>(weight), epoch});
}
// For one thread: until it is here. False: the group has failed.
__device__ inline bool receive_weight(const CallSession& call, LlPacket8* place, int peer, float& weight) {
  LlPacket8 word{};
  if (!call.wait_for_word(place, word, peer)) return false;
  weight = std::bit_cast<float>(word.value);
  if (call.scribbles_staging()) *place = {std::bit_cast<int32_t>(NAN), 0};
  return true;
}

// ---- Sums ----

// The sum of rows' chunks so far, by the contract's rules.
template <typename T>
class LlChunkSum {
public:
  __device__ void add(const LlChunk& chunk, float weight) {
#pragma unroll
    for (int i = 0; i < LlChunk::kWords; ++i)
      add_word<T>(acc_[i], chunk.words[i], weight);
  }
  __device__ LlChunk rounded() const {
    LlChunk chunk;
#pragma unroll
    for (int i = 0; i < LlChunk::kWords; ++i)
      chunk.words[i] = pack_word<T>(acc_[i]);
    return chunk;
  }

private:
  float acc_[LlChunk::kWords][kOfWord<T>] = {};
};

} // namespace epx::cuda
