// SPDX-License-Identifier: Apache-2.0
// Rows to E4M3. A block of threads loads one tile after the other, and quantises it: quantise_tile.cuh.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/device/launch.h"
#include "moe/cuda/warps.cuh"
#include "moe/quantise/cuda/kernels.h"
#include "moe/quantise/cuda/quantise_tile.cuh"

namespace epx::moe::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    quantise_rows_kernel(const __grid_constant__ QuantiseRows call) {
  __shared__ QuantiseTileMemory shared;
  const int64_t hidden = call.matrix.num_columns;
  const int64_t tiles_per_row = hidden / kTile;
  const int64_t num_items = blocks_in_use(call.zones) * tiles_per_row;
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int64_t index = item / tiles_per_row;
    const int64_t place = item % tiles_per_row;
    RowBlock block;
    if (!block.find(call.zones, index)) continue;
    TileElements<T> elements;
    elements.load(static_cast<const T*>(call.rows) + block.first_row * hidden + place * kTile, hidden, block.num_rows);
    if constexpr (std::is_same_v<T, formats::E4M3>) {
      const int i = warp_of_tile() * kWarpRows + lane() % kWarpRows;
      const ScaleLayout& layout = call.scale_layout;
      elements.set_scale(i < block.num_rows ? call.scales[layout.offset(block.first_row + i, place) / layout.scale_bytes]
                                            : 0.0f);
    }
    quantise_tile(elements, call.matrix, block, index, place, shared);
  }
}

template <typename T>
cudaError_t launch_rows(const QuantiseRows& call, const LaunchTarget& target) {
  const int64_t most_items = num_zone_blocks(call.zones.num_rows, call.zones.num_zones) * (call.matrix.num_columns / kTile);
  return epx::cuda::launch(&quantise_rows_kernel<T>, grid_of_tiles(most_items, target), stream_of(target), call);
}

} // namespace

int launch_quantise_rows(const QuantiseRows& call, const LaunchTarget& target) {
  if (call.zones.num_rows == 0 || call.zones.num_zones == 0) return cudaSuccess;
  if (call.dtype == EPX_FLOAT8_E4M3) return launch_rows<formats::E4M3>(call, target);
  if (call.dtype == EPX_FLOAT16) return launch_rows<__half>(call, target);
  if (call.dtype == EPX_BFLOAT16) return launch_rows<__nv_bfloat16>(call, target);
  return launch_rows<float>(call, target);
}

} // namespace epx::moe::cuda
