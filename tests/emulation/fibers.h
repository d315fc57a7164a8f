// Runs a CUDA grid on a CPU: each block is an operating system's thread, each of its CUDA threads a fiber on it. A fiber runs
// until it meets a barrier, exchanges values with its warp, or polls; then another one of the block runs, in random order.
//
// What this shows: the kernels' indexing, protocol and arithmetic, under the host's sanitizers, with ranks that are processes.
// What it cannot show: speed, and missing fences where a CPU's memory order is the stronger one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include <vector_types.h>

namespace epx::emulation {

constexpr int kLanes = 32;

// Runs all blocks at the same time, and returns when the last has ended.
void run_grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel);

// ---- For the running fiber ----

struct Place {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
const Place& place();

std::byte* dynamic_shared_memory();

// Lets others run; called wherever a kernel polls.
void pause();

// All threads of the block that have not ended. Returns the sum of what they bring.
int64_t meet_block(int64_t brings);

// All lanes of the warp. Returns what they bring, by lane.
const std::array<uint64_t, kLanes>& meet_warp(uint64_t brings);

} // namespace epx::emulation
