// SPDX-License-Identifier: Apache-2.0
// Rows to E4M3 with scales along rows, along the columns of each zone, or both. A block of threads takes one tile after the
// other: the rows of a block of a zone, 128 columns wide.
//
//   warps   what they do                                                          what they wait for
//   all     load 8 rows of the tile, find their maxima, store their codes and    nothing
//           scales, and leave the maxima of their columns in shared memory
//   0 to 3  each thread finds the scale of a column, and stores it                the maxima of all warps
//   all     put the codes of their rows' columns into shared memory               the scales of columns
//   all     store the transposed codes                                            the codes of all warps
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/device/launch.h"
#include "moe/cuda/warps.cuh"
#include "moe/gemm/zones.cuh"
#include "moe/quantise/cuda/kernels.h"
#include "moe/quantise/cuda/tile.cuh"

namespace epx::moe::cuda {
namespace {

__device__ DeviceZones zones_of(const QuantiseRows& call) {
  return {call.counts, call.offsets, call.num_zones, call.num_rows};
}

// Returns the blocks up to the end of the last zone, and the rows of column_scales that have none among them.
__device__ int64_t blocks_in_use(const QuantiseRows& call) {
  return num_zone_blocks(call.has_zones ? rows_in_use(zones_of(call)) : call.num_rows, call.num_zones);
}

// Rows of a zone that have scales in common along their columns.
struct RowBlock {
  int64_t first_row;
  int num_rows;
  int num_written; // with the pads of the zone that complete the block

  // Finds the block whose scales are row `index` of column_scales, or returns false if there is none. Offsets that do not ascend
  // give some block of their zones, or none.
  __device__ bool find(const QuantiseRows& call, int64_t index) {
    Zone zone{0, call.num_rows};
    int64_t end = call.num_rows;
    int low = 0;
    if (call.has_zones) {
      for (int high = call.num_zones; high - low > 1;) {
        const int middle = (low + high) / 2;
        (first_zone_block(call.offsets[middle], middle) <= index ? low : high) = middle;
      }
      zone = zone_of(zones_of(call), low);
      end = min(call.offsets[low + 1], call.num_rows);
    }
    const int64_t at = (index - first_zone_block(zone.first_row, low)) * kTile;
    if (at < 0 || at >= zone.num_rows) return false;
    first_row = zone.first_row + at;
    num_rows = static_cast<int>(min(zone.num_rows - at, int64_t{kTile}));
    num_written = static_cast<int>(min(max(end - first_row, int64_t{num_rows}), int64_t{kTile}));
    return true;
  }
};

// The tile's part of the rows' scales: place `place` of each row. A lane has the scale of row lane() % kWarpRows of its warp.
__device__ void store_row_scales(const QuantiseRows& call, const RowBlock& block, int64_t place, uint32_t stored) {
  const ScaleLayout& layout = call.row_scale_layout;
  const int i = warp_of_tile() * kWarpRows + lane();
  if (lane() >= kWarpRows || i >= block.num_written) return;
  std::byte* const scales = call.row_scales + layout.row_offset(block.first_row + i);
  epx::cuda::store_scale(scales + layout.place_offset(place), layout.scale_bytes, i < block.num_rows ? stored : 0);
  if (place + 1 < layout.num_scales) return;
  for (int64_t fill = layout.num_scales; fill < layout.places(); ++fill)
    scales[layout.place_offset(fill)] = std::byte{0};
}

// The largest magnitudes of a thread's columns, and of a row of its warp.
struct Maxima {
  uint32_t columns[kLaneColumns];
  uint32_t row; // lane() % kWarpRows
};
template <typename T, typename MagnitudeOf>
__device__ Maxima maxima_of(const TileElements<T>& elements, const MagnitudeOf& magnitude_of) {
  Maxima maxima{};
  elements.for_each_row([&](int i, const float(&x)[kLaneColumns]) {
    uint32_t of_row = 0;
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      const uint32_t magnitude = magnitude_of(x[j]);
      of_row = max(of_row, magnitude);
      maxima.columns[j] = max(maxima.columns[j], magnitude);
    }
    of_row = __reduce_max_sync(~0u, of_row);
    if (lane() % kWarpRows == i) maxima.row = of_row;
  });
  return maxima;
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    quantise_rows_kernel(const __grid_constant__ QuantiseRows call) {
  __shared__ uint4 warp_maxima[kTileWarps][kWarp]; // of the lanes' columns
  __shared__ float4 multipliers[kWarp];
  __shared__ TransposedTile transposed;
  const int64_t tiles_per_row = call.hidden / kTile;
  const int64_t num_items = blocks_in_use(call) * tiles_per_row;
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int64_t index = item / tiles_per_row;
    const int64_t place = item % tiles_per_row;
    RowBlock block;
    if (!block.find(call, index)) continue;
    const int own_written = block.num_written - warp_of_tile() * kWarpRows; // rows of the warp
    const int64_t first = block.first_row * call.hidden + place * kTile;
    TileElements<T> elements;
    elements.load(static_cast<const T*>(call.rows) + first, call.hidden, block.num_rows);
    if constexpr (std::is_same_v<T, formats::E4M3>) {
      const int i = warp_of_tile() * kWarpRows + lane() % kWarpRows;
      const ScaleLayout& layout = call.scale_layout;
      elements.set_scale(i < block.num_rows ? call.scales[layout.offset(block.first_row + i, place) / layout.scale_bytes]
                                            : 0.0f);
    }
    Maxima maxima = maxima_of(elements, [](float x) { return formats::bits_of(x) & formats::kMagnitudeBits; });
    const uint32_t largest = max(max(maxima.columns[0], maxima.columns[1]), max(maxima.columns[2], maxima.columns[3]));
    const bool is_finite = __all_sync(~0u, largest < formats::kInfinityBits ? 1 : 0) != 0; // all elements of the warp
    if (!is_finite) maxima = maxima_of(elements, [](float x) { return magnitude_if_finite(x); });

    if (call.row_codes != nullptr) {
      const auto scale = formats::scale_block(call.row_format, formats::float_of(maxima.row), true, 1.0f);
      uint8_t* const to = call.row_codes + first + warp_of_tile() * kWarpRows * call.hidden + lane() * kLaneColumns;
      with_finiteness(is_finite, [&](auto all_finite) {
        elements.for_each_row([&](int i, const float(&x)[kLaneColumns]) {
          const uint32_t codes = encode_four<formats::E4M3>(x, from_lane(scale.multiplier, i), all_finite);
          if (i < own_written) *reinterpret_cast<uint32_t*>(to + i * call.hidden) = codes;
        });
      });
      store_row_scales(call, block, place, scale.stored);
    }
    if (call.column_codes == nullptr) continue;

    warp_maxima[warp_of_tile()][lane()] = {maxima.columns[0], maxima.columns[1], maxima.columns[2], maxima.columns[3]};
    __syncthreads(); // the maxima are there, and the codes of the tile before have been stored
    if (threadIdx.x < kTile) {
      uint32_t of_column = 0;
#pragma unroll
      for (int warp = 0; warp < kTileWarps; ++warp)
        of_column = max(of_column, reinterpret_cast<const uint32_t*>(warp_maxima[warp])[threadIdx.x]);
      const auto scale = formats::scale_block(call.column_format(), formats::float_of(of_column), true, 1.0f);
      reinterpret_cast<float*>(multipliers)[threadIdx.x] = scale.multiplier;
      call.column_scales[index * call.hidden + place * kTile + threadIdx.x] = formats::float_of(scale.stored);
    }
    __syncthreads(); // the multipliers are there, and the maxima have been read
    const float4 own = multipliers[lane()];
    const float own_multipliers[kLaneColumns] = {own.x, own.y, own.z, own.w};
    uint32_t codes[kLaneColumns][kWarpRows / 4];
    with_finiteness(is_finite, [&](auto all_finite) {
#pragma unroll
      for (int k = 0; k < kWarpRows / 4; ++k) {
        float x[4][kLaneColumns];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          elements.unpack(4 * k + i, x[i]);
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) {
          const float column[] = {x[0][j], x[1][j], x[2][j], x[3][j]};
          codes[j][k] = encode_four<formats::E4M3>(column, own_multipliers[j], all_finite);
        }
      }
    });
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j)
      transposed.put(j, codes[j]);
    __syncthreads(); // the codes are there
    transposed.store(call.column_codes + place * kTile * call.num_rows + block.first_row, call.num_rows, block.num_written);
  }
}

template <typename T>
cudaError_t launch_rows(const QuantiseRows& call, const LaunchTarget& target) {
  const int64_t most_items = num_zone_blocks(call.num_rows, call.num_zones) * (call.hidden / kTile);
  return epx::cuda::launch(&quantise_rows_kernel<T>, grid_of_tiles(most_items, target), stream_of(target), call);
}

} // namespace

int launch_quantise_rows(const QuantiseRows& call, const LaunchTarget& target) {
  if (call.num_rows == 0 || call.num_zones == 0) return cudaSuccess;
  if (call.dtype == EPX_FLOAT8_E4M3) return launch_rows<formats::E4M3>(call, target);
  if (call.dtype == EPX_FLOAT16) return launch_rows<__half>(call, target);
  if (call.dtype == EPX_BFLOAT16) return launch_rows<__nv_bfloat16>(call, target);
  return launch_rows<float>(call, target);
}

} // namespace epx::moe::cuda
