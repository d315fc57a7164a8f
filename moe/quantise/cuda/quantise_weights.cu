// SPDX-License-Identifier: Apache-2.0
// Weights to E4M3 with a scale for each 128 x 128 elements, as they are and transposed. A block of threads takes one tile after
// the other.
//
//   warps   what they do                                                          what they wait for
//   all     load 8 rows of the tile, and leave their maximum in shared memory    nothing
//   all     find the scale, store their codes, and put them into shared memory    the maxima of all warps
//   all     store the transposed codes                                            the codes of all warps
#include "base/device/launch.h"
#include "moe/cuda/elements.cuh"
#include "moe/cuda/warps.cuh"
#include "moe/quantise/cuda/kernels.h"
#include "moe/quantise/cuda/tile.cuh"

namespace epx::moe::cuda {
namespace {

// Returns the largest magnitude of the warp's elements.
template <typename T, typename MagnitudeOf>
__device__ uint32_t maximum_of(const TileElements<T>& elements, const MagnitudeOf& magnitude_of) {
  uint32_t maximum = 0;
  for_each_row(elements, [&](int, const float(&x)[kLaneColumns]) {
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j)
      maximum = max(maximum, magnitude_of(x[j]));
  });
  return __reduce_max_sync(~0u, maximum);
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    quantise_weights_kernel(const __grid_constant__ QuantiseWeights call) {
  __shared__ uint32_t warp_maxima[kTileWarps];
  __shared__ TransposedTile transposed;
  const int64_t row_blocks = call.num_rows / kTile;
  const int64_t column_blocks = call.num_columns / kTile;
  const int64_t num_items = call.num_matrices * row_blocks * column_blocks;
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const auto [matrix, row_block, column_block] = WeightTile(item, row_blocks, column_blocks);
    const int64_t first_element = matrix * call.num_rows * call.num_columns;
    const int64_t first = first_element + row_block * kTile * call.num_columns + column_block * kTile;
    TileElements<T> elements;
    elements.load(static_cast<const T*>(call.weights) + first, call.num_columns, kTile);
    uint32_t maximum = maximum_of(elements, [](float x) { return formats::bits_of(x) & formats::kMagnitudeBits; });
    const bool is_finite = maximum < formats::kInfinityBits; // all elements of the warp
    if (!is_finite) maximum = maximum_of(elements, [](float x) { return magnitude_if_finite(x); });
    if (lane() == 0) warp_maxima[warp_of_tile()] = maximum;
    __syncthreads(); // the maxima are there, and the codes of the tile before have been stored
    for (const uint32_t of_warp : warp_maxima)
      maximum = max(maximum, of_warp);
    const auto scale = formats::scale_block(call.format, formats::float_of(maximum), true, 1.0f);

    uint32_t rows[kWarpRows]; // codes
    with_finiteness(is_finite, [&](auto all_finite) {
      for_each_row(elements, [&](int i, const float(&x)[kLaneColumns]) {
        rows[i] = encode_four<formats::E4M3>(x, scale.multiplier, all_finite);
      });
    });
    if (call.codes != nullptr) {
      uint8_t* const to = call.codes + first + warp_of_tile() * kWarpRows * call.num_columns + lane() * kLaneColumns;
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i)
        *reinterpret_cast<uint32_t*>(to + i * call.num_columns) = rows[i];
      if (threadIdx.x == 0) call.scales[item] = formats::float_of(scale.stored);
    }
    if (call.transposed_codes != nullptr) {
      transposed.put_rows(rows);
      if (threadIdx.x == 0)
        call.transposed_scales[(matrix * column_blocks + column_block) * row_blocks + row_block] =
            formats::float_of(scale.stored);
    }
    __syncthreads(); // the codes are there, and the maxima have been read
    if (call.transposed_codes != nullptr)
      transposed.store(call.transposed_codes + first_element + column_block * kTile * call.num_rows + row_block * kTile,
                       call.num_rows, kTile);
  }
}

template <typename T>
cudaError_t launch_weights(const QuantiseWeights& call, const LaunchTarget& target) {
  const int64_t num_items = call.num_matrices * (call.num_rows / kTile) * (call.num_columns / kTile);
  if (num_items == 0) return cudaSuccess;
  return epx::cuda::launch(&quantise_weights_kernel<T>, grid_of_tiles(num_items, target), stream_of(target), call);
}

} // namespace

int launch_quantise_weights(const QuantiseWeights& call, const LaunchTarget& target) {
  return with_element_type(call.dtype, [&]<typename T>(T) { return launch_weights<T>(call, target); });
}

} // namespace epx::moe::cuda
