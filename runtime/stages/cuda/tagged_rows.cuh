// Rows of few tokens on their way. A warp has a strip of a row in its registers; between ranks it travels as words that
// tell of themselves (TaggedTriple): nobody waits for a store to be complete before telling of it, and nobody has to be
// told.
#pragma once

#include <bit>
#include <cmath>

#include "runtime/stages/cuda/call.cuh"
#include "runtime/stages/cuda/rows.cuh"
#include "runtime/stages/cuda/warp.cuh"

namespace epx::cuda {

// What a lane has of a strip: vectors lane, lane + 32 and lane + 64. On their way their words are in four tagged words:
// those at lane, lane + 32, lane + 64 and lane + 96.
struct Strip {
  static constexpr int kVectors = kStripBytes / (kWarp * sizeof(uint4));
  static constexpr int kTriples = kStripWords / kWarp;
  static constexpr int kWords = kVectors * sizeof(uint4) / sizeof(uint32_t);
  static_assert(kWords == 3 * kTriples);

  uint32_t words[kWords];

  // Of the lane's vectors and tagged words those that `bytes` bytes take, 1 <= bytes <= kStripBytes: the first so many.
  __device__ static int vectors_of(int bytes) {
    constexpr int kEach = kWarp * sizeof(uint4);
    static_assert(kVectors * kEach == kStripBytes);
    return static_cast<int>(static_cast<unsigned>(bytes - lane() * static_cast<int>(sizeof(uint4)) + kEach - 1) / kEach);
  }
  __device__ static int triples_of(int bytes) {
    const int vectors = vectors_of(bytes);
    return vectors == 0 ? 0 : vectors + 1;
  }
};

// Byte by byte. `words`: the lane's.
__device__ __noinline__ inline void load_ragged_strip(const std::byte* from, int bytes, uint32_t* words) {
  for (int vector = 0; vector < Strip::kVectors; ++vector) {
    const int first = (vector * kWarp + lane()) * static_cast<int>(sizeof(uint4));
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(sizeof(uint4)) && first + i < bytes; ++i)
      words[vector * 4 + i / 4] |= static_cast<uint32_t>(from[first + i]) << 8 * (i % 4);
  }
}
__device__ __noinline__ inline void store_ragged_strip(std::byte* to, int bytes, const uint32_t* words) {
  for (int vector = 0; vector < Strip::kVectors; ++vector) {
    const int first = (vector * kWarp + lane()) * static_cast<int>(sizeof(uint4));
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(sizeof(uint4)) && first + i < bytes; ++i)
      to[first + i] = static_cast<std::byte>(words[vector * 4 + i / 4] >> 8 * (i % 4));
  }
}
// All lanes. `bytes` of the strip, up to kStripBytes; what it does not have is zero. kRagged: see is_ragged().
template <bool kRagged>
__device__ inline Strip load_strip(const std::byte* from, int bytes) {
  Strip strip{};
  if constexpr (kRagged) {
    load_ragged_strip(from, bytes, strip.words);
    return strip;
  }
  const int vectors = Strip::vectors_of(bytes);
#pragma unroll
  for (int i = 0; i < Strip::kVectors; ++i) {
    if (i >= vectors) continue;
    const uint4 vector = reinterpret_cast<const uint4*>(from)[i * kWarp + lane()];
    memcpy(strip.words + 4 * i, &vector, sizeof(vector));
  }
  return strip;
}
template <bool kRagged>
__device__ inline void store_strip(std::byte* to, int bytes, const Strip& strip) {
  if constexpr (kRagged) {
    store_ragged_strip(to, bytes, strip.words);
    return;
  }
  const int vectors = Strip::vectors_of(bytes);
#pragma unroll
  for (int i = 0; i < Strip::kVectors; ++i) {
    if (i >= vectors) continue;
    uint4 vector;
    memcpy(&vector, strip.words + 4 * i, sizeof(vector));
    reinterpret_cast<uint4*>(to)[i * kWarp + lane()] = vector;
  }
}

// To a place in a rank's window.
__device__ inline void send_strip(TaggedTriple* to, int bytes, const Strip& strip, Tag tag) {
  const int triples = Strip::triples_of(bytes);
#pragma unroll
  for (int i = 0; i < Strip::kTriples; ++i)
    if (i < triples)
      store_whole_relaxed_sys(to + i * kWarp + lane(),
                              TaggedTriple{{strip.words[3 * i], strip.words[3 * i + 1], strip.words[3 * i + 2]}, tag});
}
// Tests: once it has been used.
__device__ inline void poison_strip(TaggedTriple* place) {
  __syncwarp(); // all lanes have read it
#pragma unroll
  for (int i = 0; i < Strip::kTriples; ++i)
    store_whole_relaxed_sys(place + i * kWarp + lane(), TaggedTriple{{0x5a5a5a5a, 0x5a5a5a5a, 0x5a5a5a5a}, 0x5a5a5a5a});
}

// A strip on its way to this rank, as far as it has been seen.
class IncomingStrip {
public:
  // Begins to look. All lanes.
  __device__ IncomingStrip(const TaggedTriple* place, int bytes) : place_(place), triples_(Strip::triples_of(bytes)) {
    look();
  }

  // Until it is here. `peer` sends it. False: the group has failed. All lanes.
  __device__ bool wait(const Call& call, int peer) {
    const Tag tag = call.tag();
#pragma unroll 1
    while (true) {
      const TaggedTriple* missing = nullptr; // of the lane
#pragma unroll
      for (int i = 0; i < Strip::kTriples; ++i)
        if (i < triples_ && words_[i].tag != tag) missing = place_ + i * kWarp + lane();
      const unsigned lanes = __ballot_sync(~0u, missing != nullptr ? 1 : 0);
      if (lanes == 0) return true;
      bool ok = true;
      TaggedTriple word;
      if (lane() == lowest_bit(lanes)) ok = call.wait_for_word(missing, word, peer); // one, lest all poll
      if (__all_sync(~0u, ok ? 1 : 0) == 0) return false;
      look();
    }
  }
  // Once it is here.
  __device__ Strip get() const {
    Strip strip;
#pragma unroll
    for (int i = 0; i < Strip::kWords; ++i)
      strip.words[i] = i / 3 < triples_ ? words_[i / 3].values[i % 3] : 0;
    return strip;
  }

private:
  __device__ void look() {
#pragma unroll
    for (int i = 0; i < Strip::kTriples; ++i)
      if (i < triples_) words_[i] = load_whole_relaxed_sys(place_ + i * kWarp + lane());
  }

  const TaggedTriple* place_;
  int triples_;
  TaggedTriple words_[Strip::kTriples] = {};
};

// ---- Weights that go with rows, likewise: as the bits of floats ----

// To a place in a rank's window.
__device__ inline void send_weight(TaggedCount* to, float weight, Tag tag) {
  store_whole_relaxed_sys(to, TaggedCount{std::bit_cast<int32_t>(weight), tag});
}
// For one thread: until it is here. False: the group has failed.
__device__ inline bool receive_weight(const Call& call, TaggedCount* place, int peer, float& weight) {
  TaggedCount word{};
  if (!call.wait_for_word(place, word, peer)) return false;
  weight = std::bit_cast<float>(word.value);
  if (call.poisons_staging()) *place = {std::bit_cast<int32_t>(NAN), 0};
  return true;
}

// ---- Sums ----

// The sum of rows' strips so far, by the contract's rules.
template <typename T>
class StripSum {
public:
  __device__ void add(const Strip& strip, float weight) {
#pragma unroll
    for (int i = 0; i < Strip::kWords; ++i)
      add_word<T>(acc_[i], strip.words[i], weight);
  }
  __device__ Strip rounded() const {
    Strip strip;
#pragma unroll
    for (int i = 0; i < Strip::kWords; ++i)
      strip.words[i] = pack_word<T>(acc_[i]);
    return strip;
  }

private:
  float acc_[Strip::kWords][kOfWord<T>] = {};
};

} // namespace epx::cuda
