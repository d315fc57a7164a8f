// SPDX-License-Identifier: Apache-2.0
// This file moves rows of the low-latency (LL) path. A warp holds a chunk of a row in its registers; between ranks the chunk
// travels as lines of 128 bytes with an epoch in the last word of each (flag in data, LlPacket16), so it needs neither a fence
// nor a flag of its own. Eight lanes store a line in one instruction (kStoresLinesWhole, memory_order.cuh).
#pragma once

#include <bit>
#include <cmath>

#include "base/device/warp.cuh"
#include "runtime/stages/cuda/protocol/call_session.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

// A lane holds these words of a chunk: vectors lane, lane + 32 and lane + 64. Between ranks they travel as the packets of the
// same numbers. Of the last vector of a line, the epoch takes the place of the fourth word: the lane sends the fourth words of
// its three vectors in one more packet, which is number 96 + lane / 8.
struct LlChunk {
  static constexpr int kVectors = kLlChunkBytes / (kWarp * sizeof(uint4));
  static constexpr int kWords = kVectors * sizeof(uint4) / sizeof(uint32_t);

  uint32_t words[kWords];

  // The number of this lane's vectors that a chunk of `bytes` bytes fills, wholly or in part; 1 <= bytes <= kLlChunkBytes.
  __device__ static int vectors_of(int bytes) {
    constexpr int kWarpVectorBytes = kWarp * sizeof(uint4);
    static_assert(kVectors * kWarpVectorBytes == kLlChunkBytes);
    return static_cast<int>(static_cast<unsigned>(bytes - lane() * static_cast<int>(sizeof(uint4)) + kWarpVectorBytes - 1) /
                            kWarpVectorBytes);
  }
  // The number of this lane's vectors that lie in a line of which a chunk of `bytes` bytes fills a part.
  __device__ static int lines_of(int bytes) {
    constexpr int kLineBytes = kLlLinePackets * sizeof(uint4);
    return vectors_of((bytes + kLineBytes - 1) / kLineBytes * kLineBytes);
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

// Returns whether the calling lane has the last packets of lines, those with an epoch.
__device__ inline bool has_ll_flag() {
  return lane() % kLlLinePackets == kLlLinePackets - 1;
}
// Stores a chunk into a rank's window. All lanes call this.
__device__ inline void send_chunk(const CallSession& call, LlPacket16* to, int bytes, const LlChunk& chunk) {
  const Epoch epoch = call.epoch();
  const int lines = LlChunk::lines_of(bytes);
  const bool has_flag = has_ll_flag();
  const auto store_vectors = [&](bool of_this_lane) {
    __syncwarp(); // the lanes of a line store it together
#pragma unroll
    for (int i = 0; i < LlChunk::kVectors; ++i) {
      const uint32_t* const words = chunk.words + 4 * i;
      if (i < lines && of_this_lane)
        store_packet_relaxed_sys(to + i * kWarp + lane(),
                                 LlPacket16{{words[0], words[1], words[2]}, has_flag ? epoch : words[3]});
    }
  };
  if constexpr (kStoresLinesWhole) {
    store_vectors(true);
  } else {
    store_vectors(!has_flag);
    store_vectors(has_flag);
  }
  if (has_flag) call.delay(); // a receiver must not take the lines for the whole chunk
  if (lines > 0 && has_flag)
    store_packet_relaxed_sys(to + LlChunk::kVectors * kWarp + lane() / kLlLinePackets,
                             LlPacket16{{chunk.words[3], chunk.words[7], chunk.words[11]}, epoch});
}
// Tests overwrite a chunk in staging with this once it has been used.
__device__ inline void scribble_chunk(LlPacket16* packets) {
  __syncwarp(); // all lanes have read it
  for (int i = lane(); i < kLlChunkPackets; i += kWarp)
    store_packet_relaxed_sys(packets + i, LlPacket16{{0x5a5a5a5a, 0x5a5a5a5a, 0x5a5a5a5a}, 0x5a5a5a5a});
}

// A peer sends this chunk; the lane keeps what it has loaded of it so far.
class IncomingLlChunk {
public:
  // Loads the packets with an epoch once. All lanes call this.
  __device__ IncomingLlChunk(const LlPacket16* staged, int bytes) : staged_(staged), lines_(LlChunk::lines_of(bytes)) {
    load_flags();
  }

  // Waits until all lines carry the call's epoch, which `peer` stores, and loads the rest of them. Returns false when the group
  // has failed. All lanes call this.
  __device__ bool wait(const CallSession& call, int peer) {
    const Epoch epoch = call.epoch();
#pragma unroll 1
    while (true) {
      const LlPacket16* missing = nullptr; // a packet of this lane
      if (has_ll_flag()) {
#pragma unroll
        for (int i = 0; i < LlChunk::kVectors; ++i)
          if (i < lines_ && vectors_[i].epoch != epoch) missing = staged_ + i * kWarp + lane();
        if (lines_ > 0 && rest_.epoch != epoch) missing = rest_place();
      }
      const unsigned lanes = __ballot_sync(~0u, missing != nullptr ? 1 : 0);
      if (lanes == 0) break;
      bool ok = true;
      LlPacket16 packet;
      if (lane() == lowest_bit(lanes)) ok = call.wait_for_packet(missing, packet, peer); // one lane polls, not all
      if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
      load_flags();
    }
    // Behind the epochs, as NCCL does: a load of a line beside its store may see the new epoch and old data.
    __syncwarp(); // the other lanes' loads come after what the vote has told: a vote orders no memory
    if (!has_ll_flag()) load_vectors();
    return true;
  }
  // Returns the chunk, after wait() has returned true.
  __device__ LlChunk get() const {
    LlChunk chunk;
#pragma unroll
    for (int i = 0; i < LlChunk::kVectors; ++i) {
#pragma unroll
      for (int word = 0; word < 3; ++word)
        chunk.words[4 * i + word] = i < lines_ ? vectors_[i].values[word] : 0;
      chunk.words[4 * i + 3] = i >= lines_ ? 0 : has_ll_flag() ? rest_.values[i] : vectors_[i].epoch;
    }
    return chunk;
  }

private:
  __device__ const LlPacket16* rest_place() const {
    return staged_ + LlChunk::kVectors * kWarp + lane() / kLlLinePackets;
  }
  __device__ void load_vectors() {
#pragma unroll
    for (int i = 0; i < LlChunk::kVectors; ++i)
      if (i < lines_) vectors_[i] = load_packet_relaxed_sys(staged_ + i * kWarp + lane());
  }
  __device__ void load_flags() {
    if (lines_ == 0 || !has_ll_flag()) return;
    load_vectors();
    rest_ = load_packet_relaxed_sys(rest_place());
  }

  const LlPacket16* staged_;
  int lines_;
  LlPacket16 vectors_[LlChunk::kVectors] = {};
  LlPacket16 rest_ = {};
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
