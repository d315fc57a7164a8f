// In place of runtime/base/device/memory_order.cuh. Loads that a kernel may poll let others run.
#pragma once

#include <atomic>
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

inline uint32_t load_relaxed_sys(const uint32_t* word) {
  return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_relaxed);
}

inline uint32_t load_acquire_gpu(const uint32_t* word) {
  emulation::pause();
  return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}

inline void fence_acq_rel_sys() {
  std::atomic_thread_fence(std::memory_order_acq_rel);
}

inline void fence_acq_rel_gpu() {
  std::atomic_thread_fence(std::memory_order_acq_rel);
}

inline uint64_t compare_and_swap_sys(uint64_t* word, uint64_t expected, uint64_t desired) {
  return atomicCAS_system(word, expected, desired);
}

inline uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

} // namespace epx::cuda
