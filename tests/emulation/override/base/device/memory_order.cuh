// In place of base/device/memory_order.cuh. Loads that a kernel may poll let others run.
#pragma once

#include <emmintrin.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>

#include "tests/emulation/device.h"

namespace epx::cuda {

inline uint64_t load_acquire_sys(const uint64_t* word) {
  emulation::pause();
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}

inline void store_release_sys(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

inline uint64_t load_relaxed_sys(const uint64_t* word) {
  emulation::pause();
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_relaxed);
}

inline uint32_t load_acquire_sys(const uint32_t* word) {
  emulation::pause();
  return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}

inline void store_release_sys(uint32_t* word, uint32_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

inline uint32_t load_relaxed_sys(const uint32_t* word) {
  emulation::pause();
  return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_relaxed);
}

// Aligned vectors of 16 bytes are loaded and stored at once by all x86 processors that have AVX; in assembly, since a compiler may
// split what it knows to be two words.
template <typename Word>
Word load_packet_relaxed_sys(const Word* word) {
  static_assert(alignof(Word) == sizeof(Word) && (sizeof(Word) == 8 || sizeof(Word) == 16));
  emulation::pause();
  if constexpr (sizeof(Word) == 16) {
    __m128i vector;
    asm volatile("movdqa %1, %0" : "=x"(vector) : "m"(*word) : "memory");
    return std::bit_cast<Word>(vector);
  } else {
    return std::bit_cast<Word>(
        std::atomic_ref(*reinterpret_cast<uint64_t*>(const_cast<Word*>(word))).load(std::memory_order_relaxed));
  }
}
template <typename Word>
Word load_packet_acquire_sys(const Word* word) {
  const Word value = load_packet_relaxed_sys(word);
  std::atomic_thread_fence(std::memory_order_acquire);
  return value;
}
template <typename Word>
void store_packet_relaxed_sys(Word* word, const Word& value) {
  static_assert(alignof(Word) == sizeof(Word) && (sizeof(Word) == 8 || sizeof(Word) == 16));
  if constexpr (sizeof(Word) == 16)
    asm volatile("movdqa %1, %0" : "=m"(*word) : "x"(std::bit_cast<__m128i>(value)) : "memory");
  else
    std::atomic_ref(*reinterpret_cast<uint64_t*>(word)).store(std::bit_cast<uint64_t>(value), std::memory_order_relaxed);
}

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
