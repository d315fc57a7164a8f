// SPDX-License-Identifier: Apache-2.0
// Rows to E4M3. A block of threads loads one tile after the other, and quantises it (quantise_tile.cuh).
#include "base/device/kernel_addresses.h"
#include "base/device/launch.h"
#include "moe/cuda/elements.cuh"
#include "moe/cuda/warps.cuh"
#include "moe/quantise/cuda/kernels.h"
#include "moe/quantise/cuda/quantise_tile.cuh"

namespace epx::moe::cuda {
namespace {

// How far the scales of neighbouring rows, and those of neighbouring tiles of a row, are apart. Both layouts that rows in E4M3 may
// have are linear.
struct ScaleSteps {
  int64_t row, place;
  __device__ explicit ScaleSteps(const ScaleLayout& layout)
      : row(layout.row_offset(1) / sizeof(float)), place(layout.place_offset(1) / sizeof(float)) {}
};

template <typename T>
__device__ void load(const QuantiseRows& call, const ScaleSteps& steps, const Tile& tile, TileElements<T>& elements) {
  const RowBlock& block = tile.block;
  const int64_t hidden = call.matrix.num_columns;
  elements.load(static_cast<const T*>(call.rows) + block.first_row * hidden + int64_t{tile.place} * kTile, hidden,
                block.num_rows);
  if constexpr (std::is_same_v<T, formats::E4M3>) {
    const int i = warp_of_tile() * kWarpRows + lane() % kWarpRows;
    elements.set_scale(i < block.num_rows ? call.scales[(block.first_row + i) * steps.row + tile.place * steps.place]
                                          : 0.0f);
  }
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    quantise_rows_kernel(const __grid_constant__ QuantiseRows call) {
  __shared__ QuantiseTileMemory shared;
  Tiles tiles(call.zones, call.matrix.num_columns);
  const ScaleSteps steps(call.scale_layout);
  for (Tile tile; tiles.next(tile);) {
    TileElements<T> elements;
    load(call, steps, tile, elements);
    quantise_tile(elements, call.matrix, tile, shared);
  }
}

template <typename T>
cudaError_t launch_rows(const QuantiseRows& call, const LaunchTarget& target) {
  return epx::cuda::launch(&quantise_rows_kernel<T>, grid_of_tiles(most_tiles(call.zones, call.matrix.num_columns), target),
                           stream_of(target), call);
}

} // namespace

int launch_quantise_rows(const QuantiseRows& call, const LaunchTarget& target) {
  if (call.zones.num_rows == 0 || call.zones.num_zones == 0) return cudaSuccess;
  if (call.dtype == EPX_FLOAT8_E4M3) return launch_rows<formats::E4M3>(call, target);
  return with_element_type(call.dtype, [&]<typename T>(T) { return launch_rows<T>(call, target); });
}

std::vector<const void*> block_quantise_rows_kernels() {
  return epx::cuda::addresses_of(&quantise_rows_kernel<__nv_bfloat16>, &quantise_rows_kernel<formats::E4M3>);
}

} // namespace epx::moe::cuda
