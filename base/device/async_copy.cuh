// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that one thread makes for itself (PTX cp.async, non-bulk). They are generic-proxy
// accesses of the thread, weak ones, and pass the L1 cache by. The thread that begins a copy waits for it; other threads see
// what it copied after a barrier.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/device/bulk_copy.cuh"

namespace epx::cuda {

constexpr int kAsyncCopyBytes = 16;

// Begins to copy kCount times 16 bytes, kStride bytes apart on both sides; all addresses are multiples of 16.
template <int kCount, int kStride>
__device__ inline void begin_async_copies(std::byte* shared, const std::byte* global) {
  const uint32_t address = shared_address(shared);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address + i * kStride), "l"(global + i * kStride)
                 : "memory");
}
// Begins to copy the first `bytes` of 16 bytes, and to fill the rest with zeros. Nothing beyond them is read.
__device__ inline void begin_async_copy(std::byte* shared, const std::byte* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}

// The copies that this thread has begun since its last commit_group form one group, which may be empty.
__device__ inline void end_async_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all groups of this thread but the last kPending are complete.
template <int kPending>
__device__ inline void wait_for_async_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

} // namespace epx::cuda
