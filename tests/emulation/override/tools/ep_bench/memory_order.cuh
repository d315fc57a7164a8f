// In place of tools/ep_bench/memory_order.cuh. Loads that a kernel may poll let others run.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "tests/emulation/device.h"

namespace epx::bench {

inline uint64_t load_acquire_sys(const uint64_t* word) {
  emulation::pause();
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}

inline void store_release_sys(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

inline uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

} // namespace epx::bench
