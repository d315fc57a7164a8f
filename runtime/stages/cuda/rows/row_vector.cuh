// SPDX-License-Identifier: Apache-2.0
// A lane's 16 bytes of a row, and their largest magnitude, for quantised_stage.cuh.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime/formats/elements.h"
#include "runtime/stages/cuda/rows/fragments.cuh"

namespace epx::cuda {

// Returns a word of which byte i is one of the eight bytes of a and b, counted from the low end of a: nibble i of the selector says
// which.
__device__ inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return word;
#endif
}

// A lane's vector of elements.
template <typename T>
struct RowVector {
  static constexpr int kBytes = 16;
  static constexpr int kElements = kBytes / static_cast<int>(sizeof(T));
  static constexpr bool kHasHalves = sizeof(T) == 2;
  static constexpr uint32_t kInfinity = std::is_same_v<T, float>    ? formats::kInfinityBits
                                        : std::is_same_v<T, __half> ? 0x7c00
                                                                    : formats::kInfinityBits >> 16;
  uint32_t words[kBytes / 4];

  __device__ void load(const std::byte* from) {
    const uint4 vector = *reinterpret_cast<const uint4*>(from);
    memcpy(words, &vector, sizeof(vector));
  }
  __device__ void store(std::byte* to) const {
    *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
  }
  __device__ void unpack(float (&x)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i)
      unpack_word<T>(words[i], x + i * kElementsPerWord<T>);
  }
  __device__ void pack(const float (&x)[kElements]) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i)
      words[i] = pack_word<T>(x + i * kElementsPerWord<T>);
  }

  // Returns the sign of element i as bit 4 * i + 3.
  __device__ uint32_t nibble_signs() const {
    constexpr uint32_t kSigns = 0x88888888u;
    if constexpr (kHasHalves) {
      // In the bytes of the upper halves of elements, bit 7 is the sign.
      const uint32_t low = select_bytes(words[0], words[1], 0x7351), high = select_bytes(words[2], words[3], 0x7351);
      const uint32_t even = select_bytes(low, high, 0x5410),
                     odd = select_bytes(low, high, 0x7632); // elements 0, 2, 4, 6; 1, 3, 5, 7
      return ((even >> 4 & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u)) & kSigns;
    } else {
      uint32_t signs = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        signs |= words[i] >> 31 << (4 * i + 3);
      return signs;
    }
  }

  // A magnitude is the bits of an element without its sign: numbers that ascend like the bits do.
  __device__ static uint32_t max_of_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    return __vmaxu2(a, b);
#else
    return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#endif
  }
  // The largest of two magnitudes, or of two pairs of them where a word has two.
  __device__ static uint32_t max_of(uint32_t a, uint32_t b) {
    return kHasHalves ? max_of_halves(a, b) : max(a, b);
  }
  // Returns the largest magnitude, or two where a word has two: that of its low and that of its high halves.
  __device__ uint32_t amax_of_words() const {
    constexpr uint32_t kMagnitudes = kHasHalves ? 0x7fff7fffu : formats::kMagnitudeBits;
    uint32_t most = 0;
#pragma unroll
    for (uint32_t word : words)
      most = max_of(most, word & kMagnitudes);
    return most;
  }
  // Returns the largest of those.
  __device__ static uint32_t largest_of(uint32_t magnitudes) {
    return kHasHalves ? max(magnitudes >> 16, magnitudes & 0xffff) : magnitudes;
  }
  __device__ static float value_of(uint32_t magnitude) {
    if constexpr (std::is_same_v<T, __half>) {
      float x[2];
      unpack_word<__half>(magnitude, x);
      return x[0];
    } else {
      return formats::float_of(kHasHalves ? magnitude << 16 : magnitude);
    }
  }
};

} // namespace epx::cuda
