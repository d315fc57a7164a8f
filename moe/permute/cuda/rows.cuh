// SPDX-License-Identifier: Apache-2.0
// One warp copies, scales, sums and multiplies rows, with the arithmetic of epx's exchange (DESIGN: combine and its backward).
// Fragments are moved by 16-byte accesses where addresses and sizes allow them (kVector), else element by element.
#pragma once

#include <cstdint>

#include "base/device/fragment.cuh"
#include "moe/cuda/elements.cuh"
#include "moe/cuda/warps.cuh"

namespace epx::moe::cuda {

using epx::cuda::kFragment;
using epx::cuda::kWarpTile;
using epx::cuda::reduce_tree;

template <typename T>
struct alignas(16) Fragment {
  T elements[kFragment];
};

// Loads elements [h, h + kFragment) of a row of `hidden` elements, with zeros beyond its end.
template <bool kVector, typename T>
__device__ inline Fragment<T> load_fragment(const T* row, int64_t h, int64_t hidden) {
  Fragment<T> fragment{};
  if constexpr (kVector) { // hidden is a multiple of kFragment
    if (h < hidden) fragment = *reinterpret_cast<const Fragment<T>*>(row + h);
  } else {
#pragma unroll
    for (int i = 0; i < kFragment; ++i)
      if (h + i < hidden) fragment.elements[i] = row[h + i];
  }
  return fragment;
}
template <bool kVector, typename T>
__device__ inline void store_fragment(T* row, int64_t h, int64_t hidden, const Fragment<T>& fragment) {
  if constexpr (kVector) {
    if (h < hidden) *reinterpret_cast<Fragment<T>*>(row + h) = fragment;
  } else {
#pragma unroll
    for (int i = 0; i < kFragment; ++i)
      if (h + i < hidden) row[h + i] = fragment.elements[i];
  }
}

// ---- Bytes ----

template <typename Unit>
__device__ inline void copy_units(const std::byte* from, std::byte* to, int64_t bytes) {
  constexpr int kDepth = 4; // loads in flight at a time
  const auto* const source = reinterpret_cast<const Unit*>(from);
  auto* const target = reinterpret_cast<Unit*>(to);
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
#pragma unroll 1
  for (int64_t first = lane(); first < units; first += kDepth * kWarp) {
    Unit values[kDepth] = {};
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (const int64_t unit = first + i * kWarp; unit < units) values[i] = source[unit];
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (const int64_t unit = first + i * kWarp; unit < units) target[unit] = values[i];
  }
}

template <typename Unit>
__device__ inline void zero_units(std::byte* to, int64_t bytes) {
  for (int64_t unit = lane(); unit < bytes / static_cast<int64_t>(sizeof(Unit)); unit += kWarp)
    reinterpret_cast<Unit*>(to)[unit] = Unit{};
}

} // namespace epx::moe::cuda
