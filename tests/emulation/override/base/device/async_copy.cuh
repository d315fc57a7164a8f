// SPDX-License-Identifier: Apache-2.0
// Replaces base/device/async_copy.cuh. Each copy is made as late as PTX allows, by the wait for it, so that a missing wait
// shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
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
  std::vector<Copy> open_group;
  std::deque<std::vector<Copy>> groups; // not made yet
};

// Returns the copies of the running CUDA thread; see bulk::of_this_thread().
inline Copies& of_this_thread() {
  static thread_local std::map<unsigned, Copies> copies;
  return copies[threadIdx.x];
}

} // namespace async

inline void begin_async_copy(std::byte* shared, const std::byte* global, uint32_t bytes) {
  bulk::require(reinterpret_cast<uintptr_t>(shared) % kAsyncCopyBytes == 0 &&
                reinterpret_cast<uintptr_t>(global) % kAsyncCopyBytes == 0 && bytes <= kAsyncCopyBytes);
  std::memset(shared, 0xee, kAsyncCopyBytes); // undefined until the copy completes
  async::of_this_thread().open_group.push_back({shared, global, bytes});
}

template <int kCount, int kStride>
void begin_async_copies(std::byte* shared, const std::byte* global) {
  for (int i = 0; i < kCount; ++i)
    begin_async_copy(shared + i * kStride, global + i * kStride, kAsyncCopyBytes);
}

inline void end_async_copy_group() {
  async::Copies& copies = async::of_this_thread();
  copies.groups.push_back(std::move(copies.open_group));
  copies.open_group.clear();
}

template <int kPending>
void wait_for_async_copies() {
  std::deque<std::vector<async::Copy>>& groups = async::of_this_thread().groups;
  for (; groups.size() > kPending; groups.pop_front())
    for (const async::Copy& copy : groups.front()) {
      std::memset(copy.shared, 0, kAsyncCopyBytes);
      std::memcpy(copy.shared, copy.global, copy.bytes);
    }
}

} // namespace epx::cuda
