// In place of tools/ep_bench/bulk_copy.cuh. A copy has finished when it is started; what is waited for is checked.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tests/emulation/device.h"

namespace epx::bench {

using LoadBarrier = uint64_t; // phases that have ended

inline void init_barrier(LoadBarrier* barrier) {
  *barrier = 0;
}
inline void fence_barriers_for_loads() {}

inline void start_load(void* shared, const void* global, uint32_t bytes, LoadBarrier* barrier) {
  if (bytes == 0 || bytes % 16 != 0) std::abort(); // as the hardware would
  std::memcpy(shared, global, bytes);
  ++*barrier;
}

// A thread that waits for the wrong parity would wait for ever.
inline void wait_for_load(LoadBarrier* barrier, uint32_t parity) {
  while ((*barrier + 1) % 2 != parity % 2)
    emulation::pause();
}

inline void start_store(void* global, const void* shared, uint32_t bytes) {
  if (bytes == 0 || bytes % 16 != 0) std::abort();
  std::memcpy(global, shared, bytes);
}
inline void commit_stores() {}
template <int kGroups>
inline void wait_for_stores_to_read() {}
inline void wait_for_stores() {}

} // namespace epx::bench
