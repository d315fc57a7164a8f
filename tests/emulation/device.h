// SPDX-License-Identifier: Apache-2.0
// CUDA's built-in variables and functions, for kernels that a C++ compiler compiles. It is included before every kernel file.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "tests/emulation/fibers.h"

// Thread-local variables are a block's shared memory, since a block is an operating system's thread.
#undef __shared__
#define __shared__ static thread_local
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __host__
#define __host__
#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__ __attribute__((noinline))

#define threadIdx (::epx::emulation::position().thread)
#define blockIdx (::epx::emulation::position().block)
#define blockDim (::epx::emulation::position().block_dim)
#define gridDim (::epx::emulation::position().grid_dim)

namespace epx::emulation {

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) <= 8 && sizeof(From) <= 8);
  To to{};
  __builtin_memcpy(&to, &from, std::min(sizeof(To), sizeof(From)));
  return to;
}

inline int lane_id() {
  return static_cast<int>(threadIdx.x) % kLanes;
}

} // namespace epx::emulation

// ---- Block ----

inline void __syncthreads() {
  epx::emulation::reduce_block(0);
}
inline int __syncthreads_or(int predicate) {
  return epx::emulation::reduce_block(predicate != 0 ? 1 : 0) != 0 ? 1 : 0;
}
inline int __syncthreads_and(int predicate) {
  return epx::emulation::reduce_block(predicate != 0 ? 0 : 1) == 0 ? 1 : 0;
}

// ---- Warp: all lanes must take part ----

inline void __syncwarp(unsigned = ~0u) {
  epx::emulation::gather_warp(0);
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return epx::emulation::bits_as<T>(
      epx::emulation::gather_warp(epx::emulation::bits_as<uint64_t>(value))[static_cast<size_t>(from) % 32]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, epx::emulation::lane_id() ^ bits);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int from = epx::emulation::lane_id() - distance;
  return __shfl_sync(mask, value, from < 0 ? epx::emulation::lane_id() : from);
}
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  const uint64_t mine = epx::emulation::bits_as<uint64_t>(value);
  const auto& values = epx::emulation::gather_warp(mine);
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    same |= values[lane] == mine ? 1u << lane : 0u;
  return same;
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const auto& values = epx::emulation::gather_warp(predicate != 0 ? 1 : 0);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    ballot |= static_cast<unsigned>(values[lane]) << lane;
  return ballot;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  unsigned all = 0;
  for (const uint64_t lane_value : epx::emulation::gather_warp(value))
    all |= static_cast<unsigned>(lane_value);
  return all;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  unsigned largest = 0;
  for (const uint64_t lane_value : epx::emulation::gather_warp(value))
    largest = std::max(largest, static_cast<unsigned>(lane_value));
  return largest;
}
inline int __reduce_min_sync(unsigned, int value) {
  int smallest = value;
  for (const uint64_t lane_value : epx::emulation::gather_warp(epx::emulation::bits_as<uint64_t>(value)))
    smallest = std::min(smallest, epx::emulation::bits_as<int>(lane_value));
  return smallest;
}
inline int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate == 0 ? 1 : 0) == 0 ? 1 : 0;
}

// ---- Atomics of any scope ----

template <typename T>
T atomicAdd(T* word, std::type_identity_t<T> value) {
  return std::atomic_ref(*word).fetch_add(value);
}
// Counts up to `last`, then wraps to 0.
inline unsigned atomicInc(unsigned* word, unsigned last) {
  unsigned seen = std::atomic_ref(*word).load();
  while (!std::atomic_ref(*word).compare_exchange_weak(seen, seen >= last ? 0 : seen + 1)) {
  }
  return seen;
}
template <typename T>
T atomicOr(T* word, std::type_identity_t<T> value) {
  return std::atomic_ref(*word).fetch_or(value);
}
template <typename T>
T atomicExch(T* word, std::type_identity_t<T> value) {
  return std::atomic_ref(*word).exchange(value);
}
template <typename T>
T atomicMax(T* word, std::type_identity_t<T> value) {
  T seen = std::atomic_ref(*word).load();
  while (seen < value && !std::atomic_ref(*word).compare_exchange_weak(seen, value)) {
  }
  return seen;
}
template <typename T>
T atomicMin(T* word, std::type_identity_t<T> value) {
  T seen = std::atomic_ref(*word).load();
  while (value < seen && !std::atomic_ref(*word).compare_exchange_weak(seen, value)) {
  }
  return seen;
}
template <typename T>
T atomicCAS(T* word, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
  std::atomic_ref(*word).compare_exchange_strong(expected, desired);
  return expected;
}
template <typename T>
T atomicCAS_system(T* word, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
  return atomicCAS(word, expected, desired);
}

// ---- Arithmetic ----

inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline float __fmaf_rn(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
