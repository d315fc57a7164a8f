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

  // Returns the number of this lane's vectors that a chunk of `bytes` bytes fills, wholly or in part;
  // 0 <= bytes <= kLlChunkBytes.
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

// Loads a chunk whose lines and packets have all been seen to carry the call's epoch. All lanes call this.
__device__ inline LlChunk load_lines(const LlPacket16* staged, int bytes) {
  const int lines = LlChunk::lines_of(bytes);
  LlPacket16 rest{}; // the fourth words of this lane's vectors, if it has the last packets of lines
  if (lines > 0 && has_ll_flag())
    rest = load_packet_relaxed_sys(staged + LlChunk::kVectors * kWarp + lane() / kLlLinePackets);
  LlChunk chunk{};
#pragma unroll
  for (int i = 0; i < LlChunk::kVectors; ++i) {
    if (i >= lines) continue;
    const LlPacket16 vector = load_packet_relaxed_sys(staged + i * kWarp + lane());
#pragma unroll
    for (int word = 0; word < 3; ++word)
      chunk.words[4 * i + word] = vector.values[word];
    chunk.words[4 * i + 3] = has_ll_flag() ? rest.values[i] : vector.epoch;
  }
  return chunk;
}

// A peer sends this chunk. Each lane of a half of the warp looks at one of its epochs: those of its lines, and those of the
// packets behind them. So the warp can wait for two chunks at a time, one for each half.
class IncomingLlChunk {
public:
  // Loads the epochs once. All lanes call this; those of a half pass the same chunk.
  __device__ IncomingLlChunk(const LlPacket16* staged, int bytes) : staged_(staged), bytes_(bytes) {
    constexpr int kLines = LlChunk::kVectors * kLinesOfWarp;
    static_assert(kLines + kLinesOfWarp == kWarp / 2);
    const int index = lane() % (kWarp / 2);
    const int line = index < kLines ? index : index - kLines; // a packet behind the lines is sent if that line is
    const int packet = index < kLines ? index * kLlLinePackets + kLlLinePackets - 1 : LlChunk::kVectors * kWarp + line;
    flag_ = line * kLlLinePackets * static_cast<int>(sizeof(LlPacket16)) < bytes ? &staged[packet].epoch : nullptr;
    load_flag();
  }

  // Waits until all of them are the call's epoch, which `peer` stores. Returns false when the group has failed. All lanes call
  // this; those of a half pass the same peer.
  __device__ bool wait(const CallSession& call, int peer) {
    const Epoch epoch = call.epoch();
    const unsigned half = lane() < kWarp / 2 ? 0x0000ffffu : 0xffff0000u;
#pragma unroll 1
    while (const unsigned missing = __ballot_sync(~0u, is_missing(epoch) ? 1 : 0)) {
      bool ok = true;
      // One lane of a half polls, not all: that of the last epoch, which is stored when the others are.
      if (lane() == highest_bit(missing & half)) ok = call.wait_for_epoch(flag_, peer);
      if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
      load_flag();
    }
    // Lines are loaded behind their epochs, as NCCL does: a load of a line beside its store may see the new epoch and old data.
    __syncwarp(); // the loads of all lanes come after what the vote has told: a vote orders no memory
    return true;
  }
  // Returns the chunk, after wait() has returned true.
  __device__ LlChunk get() const {
    return load_lines(staged_, bytes_);
  }

private:
  static constexpr int kLinesOfWarp = kWarp / kLlLinePackets; // that the warp stores in one instruction

  // Returns whether the lane's epoch was not the call's when it was loaded.
  __device__ bool is_missing(Epoch epoch) const {
    return flag_ != nullptr && seen_ != epoch;
  }
  __device__ void load_flag() {
    if (flag_ != nullptr) seen_ = load_relaxed_sys(flag_);
  }

  const LlPacket16* staged_;
  int bytes_;
  const Epoch* flag_; // NULL: the lane has none
  Epoch seen_ = 0;
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
