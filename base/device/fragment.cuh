// SPDX-License-Identifier: Apache-2.0
// How the lanes of a warp share a row: lane l works on fragments of 8 elements, [8 l, 8 l + 8) of each warp tile of 256.
#pragma once

#include "base/device/warp.cuh"

namespace epx::cuda {

constexpr int kFragment = 8;
constexpr int kWarpTile = kFragment * kWarp;

// The fixed tree of epx_combine_bwd: there are 256 accumulators, j = h mod 256, of which this lane has the eight of its
// fragments; adjacent pairs are added until one is left. The result is in every lane.
__device__ inline float reduce_tree(float (&acc)[kFragment]) {
#pragma unroll
  for (int left = kFragment / 2; left > 0; left /= 2)
#pragma unroll
    for (int i = 0; i < left; ++i)
      acc[i] = __fadd_rn(acc[2 * i], acc[2 * i + 1]);
  float sum = acc[0];
  for (int distance = 1; distance < kWarp; distance *= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return sum;
}

} // namespace epx::cuda
