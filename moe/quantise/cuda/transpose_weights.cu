// SPDX-License-Identifier: Apache-2.0
// Weights in E4M3 with a scale for each 128 x 128 elements to their transposes. A block of threads takes one tile after the
// other. A warp loads a row of 128 bytes at a time, and stores two columns.
//
//   warps   what they do                                      what they wait for
//   all     load the codes of 8 rows of the tile              nothing
//   all     put them into shared memory                       the store of the tile before
//   all     store the transposed codes                        the codes of all warps
#include "base/device/launch.h"
#include "moe/cuda/warps.cuh"
#include "moe/quantise/cuda/kernels.h"
#include "moe/quantise/cuda/tile.cuh"

namespace epx::moe::cuda {
namespace {

__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    transpose_weights_kernel(const __grid_constant__ TransposeWeights call) {
  __shared__ TransposedTile transposed;
  const int64_t row_blocks = call.num_rows / kTile;
  const int64_t column_blocks = call.num_columns / kTile;
  const int64_t num_items = call.num_matrices * row_blocks * column_blocks;
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const auto [matrix, row_block, column_block] = WeightTile(item, row_blocks, column_blocks);
    const int64_t first_code = matrix * call.num_rows * call.num_columns;
    const int64_t row = row_block * kTile + warp_of_tile() * kWarpRows;
    const uint8_t* const from =
        call.codes + first_code + row * call.num_columns + column_block * kTile + lane() * kLaneColumns;
    uint32_t rows[kWarpRows];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i)
      rows[i] = *reinterpret_cast<const uint32_t*>(from + i * call.num_columns);
    __syncthreads(); // the codes of the tile before have been stored
    transposed.put_rows(rows);
    if (threadIdx.x == 0)
      call.transposed_scales[(matrix * column_blocks + column_block) * row_blocks + row_block] = call.scales[item];
    __syncthreads(); // the codes are there
    transposed.store(call.transposed_codes + first_code + column_block * kTile * call.num_rows + row_block * kTile,
                     call.num_rows, kTile);
  }
}

} // namespace

int launch_transpose_weights(const TransposeWeights& call, const LaunchTarget& target) {
  const int64_t num_items = call.num_matrices * (call.num_rows / kTile) * (call.num_columns / kTile);
  if (num_items == 0) return cudaSuccess;
  return epx::cuda::launch(&transpose_weights_kernel, grid_of_tiles(num_items, target), stream_of(target), call);
}

} // namespace epx::moe::cuda
