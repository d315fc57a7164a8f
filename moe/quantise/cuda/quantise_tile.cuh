// SPDX-License-Identifier: Apache-2.0
// A block of threads quantises a tile: the rows of a block of a zone, 128 columns wide. Each thread has its elements in registers
// (TileElements) or in shared memory (StagedElements).
//
//   warps   what they do                                                          what they wait for
//   all     find the maxima of their 8 rows, store codes and scales of rows,      nothing
//           and leave the maxima of their columns in shared memory
//   0 to 3  each thread finds the scale of a column, and stores it                the maxima of all warps
//   all     put the codes of their rows' columns into shared memory               the scales of columns
//   all     store the transposed codes                                            the codes of all warps
#pragma once

#include "moe/quantise/cuda/row_blocks.cuh"
#include "moe/quantise/cuda/tile.cuh"
#include "moe/quantise/matrix.h"

namespace epx::moe::cuda {

struct QuantiseTileMemory {
  uint4 warp_maxima[kTileWarps][kWarp]; // of the lanes' columns
  float4 multipliers[kWarp];
  TransposedTile transposed;
};

// The tile's part of the rows' scales: place `place` of each row. A lane has the scale of row lane() % kWarpRows of its warp.
__device__ inline void store_row_scales(const QuantisedMatrix& matrix, const RowBlock& block, int64_t place,
                                        uint32_t stored) {
  const ScaleLayout& layout = matrix.row_scale_layout;
  const int i = warp_of_tile() * kWarpRows + lane();
  if (lane() >= kWarpRows || i >= block.num_written) return;
  std::byte* const scales = matrix.row_scales + layout.row_offset(block.first_row + i);
  epx::cuda::store_scale(scales + layout.place_offset(place), layout.scale_bytes, i < block.num_rows ? stored : 0);
  if (place + 1 < layout.num_scales) return;
  for (int64_t fill = layout.num_scales; fill < layout.places(); ++fill)
    scales[layout.place_offset(fill)] = std::byte{0};
}

// The largest magnitudes of a thread's columns, and of a row of its warp where rows are wanted.
struct Maxima {
  uint32_t columns[kLaneColumns];
  uint32_t row; // lane() % kWarpRows
};
template <bool kWantsRows, typename Elements, typename MagnitudeOf>
__device__ Maxima maxima_of(const Elements& elements, const MagnitudeOf& magnitude_of) {
  Maxima maxima{};
  for_each_row(elements, [&](int i, const float(&x)[kLaneColumns]) {
    uint32_t of_row = 0;
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      const uint32_t magnitude = magnitude_of(x[j]);
      if constexpr (kWantsRows) of_row = max(of_row, magnitude);
      maxima.columns[j] = max(maxima.columns[j], magnitude);
    }
    if constexpr (kWantsRows) {
      of_row = __reduce_max_sync(~0u, of_row);
      if (lane() % kWarpRows == i) maxima.row = of_row;
    }
  });
  return maxima;
}
template <typename Elements, typename MagnitudeOf>
__device__ Maxima maxima_of(const Elements& elements, bool wants_rows, const MagnitudeOf& magnitude_of) {
  return wants_rows ? maxima_of<true>(elements, magnitude_of) : maxima_of<false>(elements, magnitude_of);
}

// Quantises a tile of the matrix. All threads of the block call this; the next call may follow at once.
template <typename Elements>
__device__ inline void quantise_tile(const Elements& elements, const QuantisedMatrix& matrix, const Tile& tile,
                                     QuantiseTileMemory& shared) {
  const RowBlock& block = tile.block;
  const int64_t place = tile.place;
  const int own_written = block.num_written - warp_of_tile() * kWarpRows; // rows of the warp
  const int64_t first = block.first_row * matrix.num_columns + place * kTile;
  const bool wants_rows = matrix.row_codes != nullptr;
  Maxima maxima = maxima_of(elements, wants_rows, [](float x) { return formats::bits_of(x) & formats::kMagnitudeBits; });
  const uint32_t largest = max(max(maxima.columns[0], maxima.columns[1]), max(maxima.columns[2], maxima.columns[3]));
  const bool is_finite = __all_sync(~0u, largest < formats::kInfinityBits ? 1 : 0) != 0; // all elements of the warp
  if (!is_finite) maxima = maxima_of(elements, wants_rows, [](float x) { return magnitude_if_finite(x); });

  if (wants_rows) {
    const auto scale = formats::scale_block(matrix.row_format, formats::float_of(maxima.row), true, 1.0f);
    uint8_t* const own = matrix.row_codes + first + warp_of_tile() * kWarpRows * matrix.num_columns + lane() * kLaneColumns;
    with_finiteness(is_finite, [&](auto all_finite) {
      uint8_t* to = own;
      for_each_row(elements, [&](int i, const float(&x)[kLaneColumns]) {
        const uint32_t codes = encode_four<formats::E4M3>(x, from_lane(scale.multiplier, i), all_finite);
        if (i < own_written) *reinterpret_cast<uint32_t*>(to) = codes;
        to += matrix.num_columns;
      });
    });
    store_row_scales(matrix, block, place, scale.stored);
  }
  if (matrix.column_codes == nullptr) return;

  shared.warp_maxima[warp_of_tile()][lane()] = {maxima.columns[0], maxima.columns[1], maxima.columns[2], maxima.columns[3]};
  __syncthreads(); // the maxima are there, and the codes of the tile before have been stored
  if (threadIdx.x < kTile) {
    uint32_t of_column = 0;
#pragma unroll
    for (int warp = 0; warp < kTileWarps; ++warp)
      of_column = max(of_column, reinterpret_cast<const uint32_t*>(shared.warp_maxima[warp])[threadIdx.x]);
    const auto scale = formats::scale_block(matrix.column_format(), formats::float_of(of_column), true, 1.0f);
    reinterpret_cast<float*>(shared.multipliers)[threadIdx.x] = scale.multiplier;
    matrix.column_scales[int64_t{tile.index} * matrix.num_columns + place * kTile + threadIdx.x] =
        formats::float_of(scale.stored);
  }
  __syncthreads(); // the multipliers are there, and the maxima have been read
  const float4 own = shared.multipliers[lane()];
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
    shared.transposed.put(j, codes[j]);
  __syncthreads(); // the codes are there
  shared.transposed.store(matrix.column_codes + place * kTile * matrix.num_rows + block.first_row, matrix.num_rows,
                          block.num_written);
}

} // namespace epx::moe::cuda
