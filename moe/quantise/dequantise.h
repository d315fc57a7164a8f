// SPDX-License-Identifier: Apache-2.0
// Rows in E4M3 back to wide ones: q * s in float32, rounded once. Arguments have been checked.
#pragma once

#include <cstdint>

#include "epx/epx.h"
#include "moe/quantise/matrix.h"

namespace epx::moe {

struct DequantiseRows {
  RowZones zones;
  int64_t num_columns;  // a multiple of kQuantiseBlock
  const uint8_t* codes; // [N, num_columns]
  const float* scales;  // [N, num_columns / 128]
  epx_dtype dtype;      // of rows: FLOAT32 or BFLOAT16
  void* rows;           // [N, num_columns]; only rows of zones are written
};

// Computes on the host.
void dequantise(const DequantiseRows& call);

} // namespace epx::moe
