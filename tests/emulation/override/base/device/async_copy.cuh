// SPDX-License-Identifier: Apache-2.0
// Replaces base/device/async_copy.cuh. Each copy is made as late as PTX allows, by the wait for it, so that a missing wait
// shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "base/device/bulk_copy.cuh"
#include "tests/emulation/device.h"

namespace epx::cuda {

constexpr int kAsyncCopyBytes = 16;

namespace async {

struct Copy {
  std::byte* shared;
  const std::byte* global;
  uint32_t bytes;
};
struct Copies {
  std::vector<Copy> begun;         // not made yet, the oldest first
  std::vector<size_t> group_sizes; // of the groups that have ended; the open group has the rest
  size_t num_grouped = 0;
};

// Returns the copies of the running CUDA thread; see bulk::of_this_thread().
inline Copies& of_this_thread() {
  static thread_local std::vector<Copies> copies;
  if (copies.size() < blockDim.x) copies.resize(blockDim.x);
  return copies[threadIdx.x];
}

} // namespace async

inline void begin_async_copy(std::byte* shared, const std::byte* global, uint32_t bytes) {
  bulk::require(reinterpret_cast<uintptr_t>(shared) % kAsyncCopyBytes == 0 &&
                reinterpret_cast<uintptr_t>(global) % kAsyncCopyBytes == 0 && bytes <= kAsyncCopyBytes);
  std::memset(shared, 0xee, kAsyncCopyBytes); // undefined until the copy completes
  async::of_this_thread().begun.push_back({shared, global, bytes});
}

template <int kCount, int kStride>
void begin_async_copies(std::byte* shared, const std::byte* global) {
  for (int i = 0; i < kCount; ++i)
    begin_async_copy(shared + i * kStride, global + i * kStride, kAsyncCopyBytes);
}

inline void end_async_copy_group() {
  async::Copies& copies = async::of_this_thread();
  copies.group_sizes.push_back(copies.begun.size() - copies.num_grouped);
  copies.num_grouped = copies.begun.size();
}

template <int kPending>
void wait_for_async_copies() {
  async::Copies& copies = async::of_this_thread();
  if (copies.group_sizes.size() <= kPending) return;
  const auto first_pending = copies.group_sizes.end() - kPending;
  const auto num_made = std::accumulate(copies.group_sizes.begin(), first_pending, size_t{0});
  for (const async::Copy& copy : std::span(copies.begun).first(num_made)) {
    std::memset(copy.shared, 0, kAsyncCopyBytes);
    std::memcpy(copy.shared, copy.global, copy.bytes);
  }
  copies.begun.erase(copies.begun.begin(), copies.begun.begin() + static_cast<std::ptrdiff_t>(num_made));
  copies.group_sizes.erase(copies.group_sizes.begin(), first_pending);
  copies.num_grouped -= num_made;
}

} // namespace epx::cuda
