// SPDX-License-Identifier: Apache-2.0
// What a quantiser of rows writes: a matrix whose rows lie in zones, in blocks of 128 along rows, along the columns of each zone, or
// both. The same structs describe a call on the host, where the zones have been checked, and to the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx.h"
#include "moe/integers.h"
#include "moe/quantise/block.h"
#include "runtime/formats/row_format.h"
#include "runtime/formats/scale_layout.h"

namespace epx::moe {

// What dequantises all E4M3 rows with float32 scales, and quantises blocks of any magnitude.
inline constexpr WireFormat kBlock128WithoutFloor{EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0f};

// Where the rows of each zone are. Without zones all rows are one.
struct RowZones {
  int64_t num_rows; // N
  bool are_given;
  int num_zones;    // 1 without any
  Integers counts;  // [num_zones]
  Integers offsets; // [num_zones + 1]
};

struct QuantisedMatrix {
  WireFormat row_format; // scaling and floor are those of columns, too
  int64_t num_rows;      // N
  int64_t num_columns;   // H, a multiple of kQuantiseBlock
  // Codes and scales of rows or of columns are NULL where they are not wanted.
  uint8_t* row_codes;    // [N, H]
  std::byte* row_scales; // in row_scale_layout
  ScaleLayout row_scale_layout;
  uint8_t* column_codes; // [H, N]
  float* column_scales;  // [num_zone_blocks(), H]

  constexpr WireFormat column_format() const {
    return {row_format.scaling, row_format.elements, EPX_FLOAT32, row_format.amax_floor};
  }
};

} // namespace epx::moe
