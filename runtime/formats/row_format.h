// SPDX-License-Identifier: Apache-2.0
// What a quantised row consists of, for host and device. epx.h has the definition of the scalings; elements.h and scaling.h have
// their arithmetic.
#pragma once

#include <cstdint>

#include "base/dtypes.h"
#include "epx/epx.h"

namespace epx {

// The format of rows on the wire. Ranks of a call agree on it. scaling NONE: the rows themselves travel, and no other field
// matters.
struct WireFormat {
  epx_scaling scaling = EPX_SCALING_NONE;
  epx_dtype elements = EPX_DTYPE_UNSET;
  epx_dtype scales = EPX_DTYPE_UNSET;
  float amax_floor = 0.0f;

  constexpr bool is_quantised() const { return scaling != EPX_SCALING_NONE; }
  // Return how many elements have a scale in common, and the base-2 logarithm of that: GPUs have no instruction for a division.
  constexpr int block() const { return 1 << block_shift(); }
  constexpr int block_shift() const { return scaling == EPX_SCALING_MX ? 5 : scaling == EPX_SCALING_NV ? 4 : 7; }
  constexpr bool has_row_scale() const { return scaling == EPX_SCALING_NV; }
  // Returns S, the scales of a row of `hidden` elements.
  constexpr int64_t num_scales(int64_t hidden) const { return (hidden + block() - 1) >> block_shift(); }
  constexpr int64_t element_bytes(int64_t hidden) const { return row_bytes(elements, hidden); }
  constexpr int64_t scale_bytes(int64_t hidden) const { return row_bytes(scales, num_scales(hidden)); }
};

// A quantised row in staging, or on its way between nodes: its elements, its row scale where it has one, and its scales, each
// behind the one before.
struct WireRow {
  int64_t row_scale; // offset in bytes
  int64_t scales;    // offset in bytes
  int64_t bytes;     // of all

  constexpr WireRow(const WireFormat& format, int64_t hidden)
      : row_scale((format.element_bytes(hidden) + kAlignment - 1) / kAlignment * kAlignment),
        scales(row_scale + (format.has_row_scale() ? kAlignment : 0)), bytes(scales + format.scale_bytes(hidden)) {}

  // Returns the bytes from one row to the next where rows follow each other. Nobody writes what lies between their parts.
  constexpr int64_t pitch() const { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

private:
  static constexpr int64_t kAlignment = 16; // bytes, of vector loads and bulk copies
};

// Returns the bytes that a row of a group takes on the wire at most. `dtype` is the group's max_token_dtype: a quantised one
// stands for all formats of it.
constexpr int64_t max_wire_bytes(epx_dtype dtype, int64_t hidden) {
  switch (dtype) {
  case EPX_FLOAT8_E4M3: // with float32 scales by 128, which take as much as E8M0 by 32, but for the last block
    return WireRow({EPX_SCALING_BLOCK128, dtype, EPX_FLOAT32, 0.0f}, hidden).bytes;
  case EPX_FLOAT8_E5M2:
    return WireRow({EPX_SCALING_MX, dtype, EPX_FLOAT8_E8M0, 0.0f}, hidden).bytes;
  case EPX_FLOAT4_E2M1:
    return WireRow({EPX_SCALING_NV, dtype, EPX_FLOAT8_E4M3, 0.0f}, hidden).bytes;
  default:
    return row_bytes(dtype, hidden);
  }
}

} // namespace epx
