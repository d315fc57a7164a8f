// SPDX-License-Identifier: Apache-2.0
// A tile of 128 rows and 128 columns that a block of threads quantises. Each element is read once, and stays in registers: a
// thread has 4 neighbouring columns of the 8 rows of its warp. So the 32 lanes have a row of the tile, and a thread's codes of a
// column are 8 neighbouring bytes of the transposed tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/device/grid.h"
#include "base/device/warp.cuh"
#include "moe/cuda/launch_target.h"
#include "moe/quantise/block.h"
#include "runtime/formats/elements.h"
#include "runtime/formats/scaling.h"
#include "runtime/stages/cuda/rows/fragments.cuh"
#include "runtime/stages/cuda/rows/quantised_row.cuh"

namespace epx::moe::cuda {

using epx::cuda::encode_four;
using epx::cuda::from_lane;
using epx::cuda::kWarp;
using epx::cuda::lane;
using epx::cuda::magnitude_if_finite;

constexpr int kTile = kQuantiseBlock; // rows and columns
constexpr int kTileThreads = 512;
constexpr int kTileWarps = kTileThreads / kWarp;
constexpr int kWarpRows = kTile / kTileWarps;
constexpr int kLaneColumns = kTile / kWarp;
constexpr int kChunk = kWarpRows; // bytes that a thread stores of a column at a time
constexpr int kTileBlocksPerSm = 2;
static_assert(kChunk == sizeof(uint2) && kLaneColumns == 4);

__device__ inline int warp_of_tile() {
  return static_cast<int>(threadIdx.x / kWarp);
}

// A grid whose blocks take one item after the other.
inline epx::cuda::Grid grid_of_tiles(int64_t num_items, const LaunchTarget& target, int blocks_per_sm = kTileBlocksPerSm) {
  const int64_t resident = int64_t{blocks_per_sm} * target.num_sms;
  return {static_cast<int>(std::min(num_items, resident)), kTileThreads};
}

// The place of a tile among those of matrices, which follow each other, each by rows of tiles.
struct WeightTile {
  __device__ WeightTile(int64_t item, int64_t row_blocks, int64_t column_blocks)
      : matrix(item / column_blocks / row_blocks), row_block(item / column_blocks % row_blocks),
        column_block(item % column_blocks) {}

  int64_t matrix, row_block, column_block;
};

// Calls encode(std::bool_constant): where an element of the warp is not finite, which is rare, other code encodes all of them.
template <typename Encode>
__device__ inline void with_finiteness(bool is_finite, const Encode& encode) {
  if (is_finite)
    encode(std::true_type());
  else
    encode(std::false_type());
}

// A thread's elements of a tile. T: float, __half, __nv_bfloat16, or E4M3 for codes that have a scale for each row.
template <typename T>
class TileElements {
public:
  // Loads from the tile's first element; rows of the tile from num_rows on are 0. `stride`: elements from one row to the next.
  __device__ void load(const T* tile, int64_t stride, int num_rows) {
    const T* row = tile + warp_of_tile() * kWarpRows * stride + lane() * kLaneColumns;
    const int own_rows = num_rows - warp_of_tile() * kWarpRows;
    if (own_rows >= kWarpRows) {
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i, row += stride)
        vectors_[i] = *reinterpret_cast<const Vector*>(row);
      return;
    }
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i, row += stride)
      vectors_[i] = i < own_rows ? *reinterpret_cast<const Vector*>(row) : Vector{};
  }
  // Of E4M3: the scale of row lane() % kWarpRows of the warp; any number where that is beyond the rows.
  __device__ void set_scale(float own_scale) {
    own_scale_ = own_scale;
  }

  // Of float: puts the thread's elements of a row there.
  __device__ void set_row(int i, const float (&x)[kLaneColumns]) {
    static_assert(std::is_same_v<T, float>);
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j)
      vectors_[i].words[j] = formats::bits_of(x[j]);
  }

  // The elements of a row. All lanes call this.
  __device__ void unpack(int i, float (&x)[kLaneColumns]) const {
    if constexpr (std::is_same_v<T, formats::E4M3>) {
      const float scale = from_lane(own_scale_, i);
#pragma unroll
      for (int j = 0; j < kLaneColumns; j += 2) {
        const float2 two = epx::cuda::decode_two<formats::E4M3>(vectors_[i].words[0] >> (8 * j) & 0xffff);
        x[j] = two.x * scale;
        x[j + 1] = two.y * scale;
      }
    } else {
#pragma unroll
      for (int word = 0; word < kWords; ++word)
        epx::cuda::unpack_word<T>(vectors_[i].words[word], x + word * epx::cuda::kElementsPerWord<T>);
    }
  }

private:
  static constexpr int kWords = kLaneColumns * static_cast<int>(sizeof(T)) / 4;
  struct alignas(4 * kWords) Vector {
    uint32_t words[kWords];
  };

  Vector vectors_[kWarpRows];
  float own_scale_ = 0.0f;
};

// The elements of a tile in shared memory. A thread reads what it has put there itself, so nobody waits for another one.
class StagedElements {
public:
  __device__ void set_row(int i, const float (&x)[kLaneColumns]) { rows_[i][threadIdx.x] = {x[0], x[1], x[2], x[3]}; }
  __device__ void unpack(int i, float (&x)[kLaneColumns]) const {
    const float4 row = rows_[i][threadIdx.x];
    x[0] = row.x, x[1] = row.y, x[2] = row.z, x[3] = row.w;
  }

private:
  float4 rows_[kWarpRows][kTileThreads];
};

// Calls take(row of the warp, the four elements) for each row of a thread's elements of a tile. All lanes call this.
template <typename Elements, typename Take>
__device__ void for_each_row(const Elements& elements, const Take& take) {
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    float x[kLaneColumns];
    elements.unpack(i, x);
    take(i, x);
  }
}

// The codes of a tile in shared memory, transposed. A thread stores the 8 bytes of one of its columns at a time: 16 neighbouring
// lanes then meet 16 different chunks, so that no two of them share a bank.
class TransposedTile {
public:
  // Stores the thread's codes of column j of its columns, of row 4 k + i in byte i of words[k].
  __device__ void put(int j, const uint32_t (&words)[kWarpRows / 4]) {
    const unsigned column = threadIdx.x % kWarp * kLaneColumns + static_cast<unsigned>(j);
    chunks_[column][swizzled(column, threadIdx.x / kWarp)] = uint2{words[0], words[1]};
  }
  // Stores the thread's codes, those of its columns of row i in rows[i].
  __device__ void put_rows(const uint32_t (&rows)[kWarpRows]) {
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      uint32_t codes[kWarpRows / 4] = {};
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i)
        codes[i / 4] |= (rows[i] >> (8 * j) & 0xff) << (8 * (i % 4));
      put(j, codes);
    }
  }
  // Stores the first `count` codes of each column to `to`, whose columns are `stride` bytes apart. What other threads have put is
  // there.
  __device__ void store(uint8_t* to, int64_t stride, int count) const {
    constexpr unsigned kColumnsAtATime = kTileThreads / kChunks;
    const unsigned chunk = threadIdx.x % kChunks;
    const int left = count - static_cast<int>(chunk) * kChunk;
    const bool is_vector = left >= kChunk && (reinterpret_cast<uint64_t>(to) | static_cast<uint64_t>(stride)) % kChunk == 0;
    unsigned column = threadIdx.x / kChunks;
    uint8_t* at = to + column * stride + chunk * kChunk;
#pragma unroll
    for (int i = 0; i < kTile * kTile / (kTileThreads * kChunk); ++i, column += kColumnsAtATime) {
      const uint2 codes = chunks_[column][swizzled(column, chunk)];
      if (is_vector) {
        *reinterpret_cast<uint2*>(at) = codes;
      } else {
#pragma unroll
        for (int byte = 0; byte < kChunk; ++byte)
          if (byte < left) at[byte] = static_cast<uint8_t>((byte < 4 ? codes.x : codes.y) >> (8 * (byte % 4)));
      }
      at += kColumnsAtATime * stride;
    }
  }

private:
  static constexpr unsigned kChunks = kTile / kChunk; // of a column

  __device__ static unsigned swizzled(unsigned column, unsigned chunk) {
    return chunk ^ (column / kLaneColumns % kChunks);
  }

  uint2 chunks_[kTile][kChunks];
};

} // namespace epx::moe::cuda
