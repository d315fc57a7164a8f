// SPDX-License-Identifier: Apache-2.0
// Fragments of rows in registers: how they are loaded, stored, converted to fp32 and rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/device/fragment.cuh"
#include "base/device/warp.cuh"

namespace epx::cuda {

// A fragment is an array of words, since the compiler would move an array of elements one by one.

template <typename T>
struct alignas(16) Fragment {
  uint32_t words[kFragment * sizeof(T) / sizeof(uint32_t)];
};

template <typename T>
constexpr int kElementsPerWord = static_cast<int>(sizeof(uint32_t) / sizeof(T));

template <typename T>
__device__ inline void unpack_word(uint32_t word, float* x) {
  if constexpr (std::is_same_v<T, float>) {
    x[0] = std::bit_cast<float>(word);
  } else if constexpr (std::is_same_v<T, __half>) {
    __half2 pair;
    memcpy(static_cast<void*>(&pair), &word, sizeof(pair));
    x[0] = __low2float(pair);
    x[1] = __high2float(pair);
  } else { // a bfloat16 is the upper half of a float
    x[0] = std::bit_cast<float>(word << 16);
    x[1] = std::bit_cast<float>(word & 0xffff0000u);
  }
}

// Rounds to nearest even.
template <typename T>
__device__ inline uint32_t pack_word(const float* x) {
  uint32_t word;
  if constexpr (std::is_same_v<T, float>) {
    word = std::bit_cast<uint32_t>(x[0]);
  } else if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

template <typename T>
__device__ inline void unpack(const Fragment<T>& fragment, float (&x)[kFragment]) {
#pragma unroll
  for (int i = 0; i < kFragment / kElementsPerWord<T>; ++i)
    unpack_word<T>(fragment.words[i], x + i * kElementsPerWord<T>);
}
template <typename T>
__device__ inline Fragment<T> pack(const float (&x)[kFragment]) {
  Fragment<T> fragment;
#pragma unroll
  for (int i = 0; i < kFragment / kElementsPerWord<T>; ++i)
    fragment.words[i] = pack_word<T>(x + i * kElementsPerWord<T>);
  return fragment;
}

// The address is aligned to 16 bytes.
template <typename T>
__device__ inline Fragment<T> load_vector(const void* from) {
  Fragment<T> fragment;
#pragma unroll
  for (size_t i = 0; i < sizeof(fragment) / sizeof(uint4); ++i) {
    const uint4 vector = static_cast<const uint4*>(from)[i];
    memcpy(fragment.words + 4 * i, &vector, sizeof(vector));
  }
  return fragment;
}
template <typename T>
__device__ inline void store_vector(void* to, const Fragment<T>& fragment) {
#pragma unroll
  for (size_t i = 0; i < sizeof(fragment) / sizeof(uint4); ++i) {
    uint4 vector;
    memcpy(&vector, fragment.words + 4 * i, sizeof(vector));
    static_cast<uint4*>(to)[i] = vector;
  }
}

// The address may be unaligned. Loads elements [h, h + kFragment) of a row of `hidden` elements, with zeros beyond its end.
template <typename T>
__device__ inline Fragment<T> load_elements(const T* row, int64_t h, int64_t hidden) {
  T elements[kFragment];
  for (int i = 0; i < kFragment; ++i)
    elements[i] = h + i < hidden ? row[h + i] : T(0.0f);
  Fragment<T> fragment;
  memcpy(&fragment, elements, sizeof(fragment));
  return fragment;
}
// Stores those that are elements of the row.
template <typename T>
__device__ inline void store_elements(T* row, int64_t h, int64_t hidden, const Fragment<T>& fragment) {
  T elements[kFragment];
  memcpy(static_cast<void*>(elements), &fragment, sizeof(fragment));
  for (int i = 0; i < kFragment; ++i)
    if (h + i >= 0 && h + i < hidden) row[h + i] = elements[i];
}

// Returns whether rows of `hidden` elements at these addresses, OR-ed together, can be loaded and stored as vectors.
__device__ inline bool is_vectorizable(uint64_t address_bits, int64_t hidden) {
  return address_bits % 16 == 0 && hidden % kFragment == 0;
}

// The byte offset of the lane's fragment of a warp tile, from the first warp tile on.
template <typename T>
__device__ inline uint32_t offset_of_fragment(int warp_tile) {
  return static_cast<uint32_t>(warp_tile * kWarpTile + lane() * kFragment) * sizeof(T);
}

} // namespace epx::cuda
