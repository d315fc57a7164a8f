// SPDX-License-Identifier: Apache-2.0
// How the kernels of this library share their work: each warp takes one item after the other, and no warp waits for another
// one, so any number of blocks gives the same results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/device/launch.h"
#include "base/device/warp.cuh"
#include "moe/cuda/launch_target.h"

namespace epx::moe::cuda {

using epx::cuda::kWarp;
using epx::cuda::lane;

constexpr int kThreads = 128; // of a block whose warps work alone
constexpr int kWarpsPerBlock = kThreads / kWarp;
constexpr int kBlocksPerSm = 2048 / kThreads; // as many threads as an SM has room for

inline epx::cuda::Grid grid_of_warps(int64_t num_items, const LaunchTarget& target, size_t shared_bytes = 0) {
  const int64_t blocks = (num_items + kWarpsPerBlock - 1) / kWarpsPerBlock;
  const int64_t resident = int64_t{kBlocksPerSm} * target.num_sms;
  return {static_cast<int>(std::min(blocks, resident)), kThreads, shared_bytes};
}

inline cudaStream_t stream_of(const LaunchTarget& target) {
  return static_cast<cudaStream_t>(target.stream);
}

__device__ inline int warp_of_block() {
  return static_cast<int>(threadIdx.x) / kWarp;
}

// Calls visit(item) for each item of this warp, with all lanes. A kernel of grid_of_warps() calls this.
template <typename Visit>
__device__ inline void for_each_item(int64_t num_items, const Visit& visit) {
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
#pragma unroll 1
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp_of_block(); item < num_items;
       item += num_warps)
    visit(item);
}

// The sum over the lanes by one fixed tree, in every lane.
template <typename T>
__device__ inline T sum_of_lanes(T value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// The sum over a block of kBlockThreads threads, in every thread. All threads call this.
constexpr int kBlockThreads = 256;
__device__ inline double sum_of_block(double value) {
  constexpr int kWarps = kBlockThreads / kWarp;
  __shared__ double sums[kWarps];
  value = sum_of_lanes(value);
  __syncthreads(); // all threads have read the sums of the call before
  if (lane() == 0) sums[warp_of_block()] = value;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kWarps; ++warp)
    sum += sums[warp];
  return sum;
}

} // namespace epx::moe::cuda
