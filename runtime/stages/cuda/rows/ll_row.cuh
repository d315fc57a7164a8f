// SPDX-License-Identifier: Apache-2.0
// This file moves rows of the low-latency (LL) path. A warp holds a chunk of a row in its registers; between ranks the chunk
// travels as LL packets (LlPacket16, flag in data), each stored and loaded by one single-copy atomic access of 16 bytes, so it
// needs neither a fence nor a flag of its own.
#pragma once

#include <bit>
#include <cmath>

#include "base/device/warp.cuh"
#include "runtime/stages/cuda/protocol/call_session.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

// A lane holds these words of a chunk: vectors lane, lane + 32 and lane + 64. Between ranks their words travel in four LL
// packets: those at lane, lane + 32, lane + 64 and lane + 96.
struct LlChunk {
  static constexpr int kVectors = kLlChunkBytes / (kWarp * sizeof(uint4));
  static constexpr int kPackets = kLlChunkPackets / kWarp;
  static constexpr int kWords = kVectors * sizeof(uint4) / sizeof(uint32_t);
  static_assert(kWords == 3 * kPackets);

  uint32_t words[kWords];

  // The number of this lane's vectors that a chunk of `bytes` bytes fills, wholly or in part; 1 <= bytes <= kLlChunkBytes.
  __device__ static int vectors_of(int bytes) {
    constexpr int kWarpVectorBytes = kWarp * sizeof(uint4);
    static_assert(kVectors * kWarpVectorBytes == kLlChunkBytes);
    return static_cast<int>(static_cast<unsigned>(bytes - lane() * static_cast<int>(sizeof(uint4)) + kWarpVectorBytes - 1) /
                            kWarpVectorBytes);
  }
  // The same for its packets: 4 v words in packets of 3 words, where v is 0..3.
  __device__ static int packets_of(int bytes) {
    const int vectors = vectors_of(bytes);
    return vectors == 0 ? 0 : vectors + 1;
  }
};

// These two move a chunk byte by byte; `words` are the lane's.
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
// All lanes call this. It loads `bytes` bytes of a chunk, up to kLlChunkBytes; the rest is zero. kUnaligned: see
// is_unaligned().
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

// Stores a chunk into a rank's window.
__device__ inline void send_chunk(LlPacket16* to, int bytes, const LlChunk& chunk, Epoch epoch) {
  const int num_packets = LlChunk::packets_of(bytes);
#pragma unroll
  for (int i = 0; i < LlChunk::kPackets; ++i)
    if (i < num_packets)
      store_packet_relaxed_sys(to + i * kWarp + lane(),
                               LlPacket16{{chunk.words[3 * i], chunk.words[3 * i + 1], chunk.words[3 * i + 2]}, epoch});
}
// Tests overwrite a chunk in staging with this once it has been used.
__device__ inline void scribble_chunk(LlPacket16* packets) {
  __syncwarp(); // all lanes have read it
#pragma unroll
  for (int i = 0; i < LlChunk::kPackets; ++i)
    store_packet_relaxed_sys(packets + i * kWarp + lane(), LlPacket16{{0x5a5a5a5a, 0x5a5a5a5a, 0x5a5a5a5a}, 0x5a5a5a5a});
}

// A peer sends this chunk; the lane keeps the packets of it that it has loaded so far.
class IncomingLlChunk {
public:
  // Loads the packets once. All lanes call this.
  __device__ IncomingLlChunk(const LlPacket16* staged, int bytes)
      : staged_(staged), num_packets_(LlChunk::packets_of(bytes)) {
    load();
  }

  // Waits until all packets carry the call's epoch; `peer` stores them. Returns false when the group has failed. All lanes call
  // this.
  __device__ bool wait(const CallSession& call, int peer) {
    const Epoch epoch = call.epoch();
#pragma unroll 1
    while (true) {
      const LlPacket16* missing = nullptr; // a packet of this lane
#pragma unroll
      for (int i = 0; i < LlChunk::kPackets; ++i)
        if (i < num_packets_ && packets_[i].epoch != epoch) missing = staged_ + i * kWarp + lane();
      const unsigned lanes = __ballot_sync(~0u, missing != nullptr ? 1 : 0);
      if (lanes == 0) return true;
      bool ok = true;
      LlPacket16 packet;
      if (lane() == lowest_bit(lanes)) ok = call.wait_for_packet(missing, packet, peer); // one lane polls, not all
      if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
      load();
    }
  }
  // Returns the chunk, after wait() has returned true.
  __device__ LlChunk get() const {
    LlChunk chunk;
#pragma unroll
    for (int i = 0; i < LlChunk::kWords; ++i)
      chunk.words[i] = i / 3 < num_packets_ ? packets_[i / 3].values[i % 3] : 0;
    return chunk;
  }

private:
  __device__ void load() {
#pragma unroll
    for (int i = 0; i < LlChunk::kPackets; ++i)
      if (i < num_packets_) packets_[i] = load_packet_relaxed_sys(staged_ + i * kWarp + lane());
  }

  const LlPacket16* staged_;
  int num_packets_;
  LlPacket16 packets_[LlChunk::kPackets] = {};
};

// ---- Weights travel with rows as LL packets too (LlPacket8), as the bits of floats ----

// Stores a weight into a rank's window.
__device__ inline void send_weight(LlPacket8* to, float weight, Epoch epoch) {
  store_packet_relaxed_sys(to, LlPacket8{std::bit_cast<int32_t>(weight), epoch});
}
// One thread waits until the packet carries the call's epoch. Returns false when the group has failed.
__device__ inline bool receive_weight(const CallSession& call, LlPacket8* staged, int peer, float& weight) {
  LlPacket8 packet{};
  if (!call.wait_for_packet(staged, packet, peer)) return false;
  weight = std::bit_cast<float>(packet.value);
  if (call.scribbles_staging()) *staged = {std::bit_cast<int32_t>(NAN), 0};
  return true;
}

// ---- Sums ----

// Sums chunks of rows, by the contract's rules.
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
  float acc_[LlChunk::kWords][kElementsPerWord<T>] = {};
};

} // namespace epx::cuda
