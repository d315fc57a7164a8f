// SPDX-License-Identifier: Apache-2.0
// Replaces base/device/memory_order.cuh. Loads that a kernel may poll let other fibers run.
#pragma once

#include <emmintrin.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>

#include "tests/emulation/device.h"

namespace epx::emulation {

template <typename Word>
Word poll(const Word* word, std::memory_order order) {
  pause();
  const Word value = std::atomic_ref(*const_cast<Word*>(word)).load(order);
  observe(word, value);
  return value;
}

} // namespace epx::emulation

namespace epx::cuda {

inline uint64_t load_acquire_sys(const uint64_t* word) {
  return emulation::poll(word, std::memory_order_acquire);
}

inline void store_release_sys(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

inline uint64_t load_relaxed_sys(const uint64_t* word) {
  return emulation::poll(word, std::memory_order_relaxed);
}

inline uint32_t load_acquire_sys(const uint32_t* word) {
  return emulation::poll(word, std::memory_order_acquire);
}

inline void store_release_sys(uint32_t* word, uint32_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

inline uint32_t load_relaxed_sys(const uint32_t* word) {
  return emulation::poll(word, std::memory_order_relaxed);
}

// LL packets need single-copy atomic accesses: aligned vectors of 16 bytes are loaded and stored at once by all x86 processors
// that have AVX. The accesses are in assembly, since a compiler may split what it knows to be two words.
template <typename Packet>
Packet load_packet_relaxed_sys(const Packet* packet) {
  static_assert(alignof(Packet) == sizeof(Packet) && (sizeof(Packet) == 8 || sizeof(Packet) == 16));
  if constexpr (sizeof(Packet) == 16) {
    emulation::pause();
    __m128i vector;
    asm volatile("movdqa %1, %0" : "=x"(vector) : "m"(*packet) : "memory");
    const auto words = std::bit_cast<std::array<uint64_t, 2>>(vector);
    emulation::observe(packet, words[0] * 0x9e3779b97f4a7c15u ^ words[1]);
    return std::bit_cast<Packet>(vector);
  } else {
    return std::bit_cast<Packet>(emulation::poll(reinterpret_cast<const uint64_t*>(packet), std::memory_order_relaxed));
  }
}
template <typename Packet>
Packet load_packet_acquire_sys(const Packet* packet) {
  const Packet value = load_packet_relaxed_sys(packet);
  std::atomic_thread_fence(std::memory_order_acquire);
  return value;
}
template <typename Packet>
void store_packet_relaxed_sys(Packet* packet, const Packet& value) {
  static_assert(alignof(Packet) == sizeof(Packet) && (sizeof(Packet) == 8 || sizeof(Packet) == 16));
  if constexpr (sizeof(Packet) == 16)
    asm volatile("movdqa %1, %0" : "=m"(*packet) : "x"(std::bit_cast<__m128i>(value)) : "memory");
  else
    std::atomic_ref(*reinterpret_cast<uint64_t*>(packet)).store(std::bit_cast<uint64_t>(value), std::memory_order_relaxed);
}

constexpr bool kStoresLinesWhole = false; // lanes run one after the other, in any order

inline void store_relaxed_sys(uint32_t* word, uint32_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_relaxed);
}

inline void fence_acq_rel_sys() {
  std::atomic_thread_fence(std::memory_order_acq_rel);
}
inline void fence_acq_rel_block() {
  std::atomic_thread_fence(std::memory_order_acq_rel);
}

inline void store_relaxed_sys(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_relaxed);
}

inline void backoff(unsigned) {
  emulation::pause();
}

inline uint64_t compare_and_swap_sys(uint64_t* word, uint64_t expected, uint64_t desired) {
  return atomicCAS_system(word, expected, desired);
}

inline uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

} // namespace epx::cuda
