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
  // give some block of their zones, or none. All lanes of a warp call this.
  __device__ bool find(const RowZones& zones, int64_t index) {
    Zone zone{0, zones.num_rows};
    int64_t end = zones.num_rows;
    int expert = 0;
    if (zones.are_given) {
      int begun = 0; // zones whose first block is not behind this one
      for (int first = 0; first < zones.num_zones; first += kWarp) {
        const int at = first + lane();
        begun += __popc(__ballot_sync(~0u, at < zones.num_zones && first_zone_block(zones.offsets[at], at) <= index));
      }
      expert = max(begun - 1, 0);
      zone = zone_of(device_zones(zones), expert);
      end = min(zones.offsets[expert + 1], zones.num_rows);
    }
    const int64_t at = (index - first_zone_block(zone.first_row, expert)) * kTile;
    if (at < 0 || at >= zone.num_rows) return false;
    first_row = zone.first_row + at;
    num_rows = static_cast<int>(min(zone.num_rows - at, int64_t{kTile}));
    num_written = static_cast<int>(min(max(end - first_row, int64_t{num_rows}), int64_t{kTile}));
    return true;
  }
};

// kTile columns of a block of rows.
struct Tile {
  unsigned index;     // of the row of column_scales
  unsigned place = 0; // of the tile in a row
  RowBlock block;
};

// The tiles of a block of threads, one after the other. They come in runs with the same rows: to find these takes a third of the
// instructions that a tile takes.
class Tiles {
public:
  __device__ Tiles(const RowZones& zones, int64_t num_columns)
      : zones_(zones), tiles_of_row_(static_cast<unsigned>(num_columns / kTile)),
        num_runs_(static_cast<unsigned>(blocks_in_use(zones)) * runs_of_row()), run_(blockIdx.x) {}

  // Makes the tile, which this has made before, the next one, or returns false. All lanes of a warp call this.
  __device__ bool next(Tile& tile) {
    if (++tile.place < end_) return true;
    for (; run_ < num_runs_; run_ += gridDim.x) {
      tile.index = run_ / runs_of_row();
      if (!tile.block.find(zones_, tile.index)) continue;
      tile.place = run_ % runs_of_row() * kTilesOfRun;
      end_ = min(tile.place + kTilesOfRun, tiles_of_row_);
      run_ += gridDim.x;
      return true;
    }
    return false;
  }

private:
  static constexpr unsigned kTilesOfRun = 4;

  __device__ unsigned runs_of_row() const { return (tiles_of_row_ + kTilesOfRun - 1) / kTilesOfRun; }

  const RowZones& zones_;
  unsigned tiles_of_row_;
  unsigned num_runs_;
  unsigned run_;
  unsigned end_ = 0; // of the places of the run
};

// Returns the tiles of zones of any values, for the size of a grid.
inline int64_t most_tiles(const RowZones& zones, int64_t num_columns) {
  return num_zone_blocks(zones.num_rows, zones.num_zones) * (num_columns / kTile);
}

} // namespace epx::moe::cuda
