// SPDX-License-Identifier: Apache-2.0
// The zones of the local experts on the device, bounded by the rows that there are.
#pragma once

#include "moe/gemm/grouped_gemm.h"

namespace epx::moe::cuda {

struct Zone {
  int64_t first_row;
  int64_t num_rows;
};

__device__ inline Zone zone_of(const DeviceZones& zones, int expert) {
  const int64_t first = zones.offsets[expert];
  const int64_t count = zones.counts[expert];
  const int64_t begin = min(max(first, int64_t{0}), zones.num_rows);
  return {begin, min(max(count, int64_t{0}), zones.num_rows - begin)};
}

// Returns whether a and b are columns of zones, [m, N] and [n, N], where others have rows.
__host__ __device__ inline bool has_columns(const GroupedGemm& gemm) {
  return gemm.product == Product::kWeightGradient && gemm.in_dtype == EPX_FLOAT8_E4M3;
}

// Where the scales of an expert's product in FLOAT8_E4M3 begin.
struct ScaleOffsets {
  int64_t a, b;
};
__device__ inline ScaleOffsets scale_offsets(const GroupedGemm& gemm, const Zone& zone, int expert) {
  if (gemm.product == Product::kWeightGradient) {
    const int64_t block = first_zone_block(zone.first_row, expert);
    return {block * gemm.m, block * gemm.n};
  }
  const int64_t blocks = gemm.k / kQuantiseBlock;
  return {zone.first_row * blocks, expert * (gemm.n / kQuantiseBlock) * blocks};
}

// Returns the rows up to the end of the last zone.
__device__ inline int64_t rows_in_use(const DeviceZones& zones) {
  return min(max(zones.offsets[zones.num_experts], int64_t{0}), zones.num_rows);
}

// Returns the expert whose zone has the row, or -1 for a pad row. Offsets that do not ascend give some expert or -1.
__device__ inline int expert_of_row(const DeviceZones& zones, int64_t row) {
  int low = 0;
  int high = zones.num_experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (zones.offsets[middle] <= row ? low : high) = middle;
  }
  if (high == 0) return -1;
  const Zone zone = zone_of(zones, low);
  return row >= zone.first_row && row - zone.first_row < zone.num_rows ? low : -1;
}

} // namespace epx::moe::cuda
