// SPDX-License-Identifier: Apache-2.0
// Runs a CUDA grid on a CPU: each block is an operating system's thread, and each of its CUDA threads is a fiber on it. A fiber
// runs until it reaches a barrier, exchanges values with its warp, or polls; then another one of the block runs, in random
// order.
//
// This tests the kernels' indexing, protocol and arithmetic, under the host's sanitizers, with ranks that are processes. It
// cannot test speed, nor missing fences where a CPU's memory order is the stronger one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include <vector_types.h>

namespace epx::emulation {

constexpr int kLanes = 32;

// Runs all blocks concurrently, and returns when the last one has ended.
void run_grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel);

// ---- For the running fiber ----

struct ThreadPosition {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
// Of the running fiber; every access of a kernel to threadIdx reads it, so it is inline. It is the operating system's thread's, which
// runs one block.
extern constinit thread_local const ThreadPosition* running_position;
inline const ThreadPosition& position() {
  return *running_position;
}

std::byte* dynamic_shared_memory();

// Lets other fibers run; it is called wherever a kernel polls.
void pause();

// A kernel has polled `word` and found `value` there. A block whose fibers find only what they have found before sleeps.
void observe(const void* word, uint64_t value);

// A barrier of all threads of the block that have not ended. Returns the sum of their values.
int64_t reduce_block(int64_t value);

// A barrier of all lanes of the warp. Returns their values, by lane.
const std::array<uint64_t, kLanes>& gather_warp(uint64_t value);

} // namespace epx::emulation
