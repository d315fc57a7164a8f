// SPDX-License-Identifier: Apache-2.0
// The blocks of rows of a matrix that kernels quantise. Zones of any values are bounded to the rows.
#pragma once

#include "moe/gemm/zones.cuh"
#include "moe/quantise/cuda/tile.cuh"
#include "moe/quantise/matrix.h"

namespace epx::moe::cuda {

__device__ inline DeviceZones device_zones(const RowZones& zones) {
  return {zones.counts, zones.offsets, zones.num_zones, zones.num_rows};
}

// Returns the blocks up to the end of the last zone, and the rows of column_scales that have none among them.
__device__ inline int64_t blocks_in_use(const RowZones& zones) {
  return num_zone_blocks(zones.are_given ? rows_in_use(device_zones(zones)) : zones.num_rows, zones.num_zones);
}

// Rows of a zone that have scales in common along their columns.
struct RowBlock {
  int64_t first_row;
  int num_rows;
  int num_written; // with the pads of the zone that complete the block

  // Finds the block whose scales are row `index` of column_scales, or returns false if there is none. Offsets that do not ascend
  // give some block of their zones, or none.
  __device__ bool find(const RowZones& zones, int64_t index) {
    Zone zone{0, zones.num_rows};
    int64_t end = zones.num_rows;
    int low = 0;
    if (zones.are_given) {
      for (int high = zones.num_zones; high - low > 1;) {
        const int middle = (low + high) / 2;
        (first_zone_block(zones.offsets[middle], middle) <= index ? low : high) = middle;
      }
      zone = zone_of(device_zones(zones), low);
      end = min(zones.offsets[low + 1], zones.num_rows);
    }
    const int64_t at = (index - first_zone_block(zone.first_row, low)) * kTile;
    if (at < 0 || at >= zone.num_rows) return false;
    first_row = zone.first_row + at;
    num_rows = static_cast<int>(min(zone.num_rows - at, int64_t{kTile}));
    num_written = static_cast<int>(min(max(end - first_row, int64_t{num_rows}), int64_t{kTile}));
    return true;
  }
};

// Returns the tiles of zones of any values, for the size of a grid.
inline int64_t most_tiles(const RowZones& zones, int64_t num_columns) {
  return num_zone_blocks(zones.num_rows, zones.num_zones) * (num_columns / kTile);
}

// Calls take(index of the block's column_scales, place of the tile in a row, block) for each tile of this block of threads.
template <typename Take>
__device__ void for_each_tile(const RowZones& zones, int64_t num_columns, const Take& take) {
  const int64_t tiles_per_row = num_columns / kTile;
  const int64_t num_items = blocks_in_use(zones) * tiles_per_row;
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    RowBlock block;
    if (block.find(zones, item / tiles_per_row)) take(item / tiles_per_row, item % tiles_per_row, block);
  }
}

} // namespace epx::moe::cuda
