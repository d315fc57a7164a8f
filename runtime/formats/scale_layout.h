// SPDX-License-Identifier: Apache-2.0
// Where the scales of received rows lie, for host and device: the layouts of epx_scale_layout.
#pragma once

#include <cstdint>

#include "epx/epx.h"

namespace epx {

struct ScaleLayout {
  static constexpr int kPerWord = 4;        // scales of one byte that a packed entry, or a row of a tile, has
  static constexpr int64_t kTileRows = 128; // of kPerWord scales each

  epx_scale_layout layout = EPX_SCALES_ROWS;
  int scale_bytes = 0;    // of one scale
  int64_t num_scales = 0; // S
  int64_t rows = 0;       // N

  // Returns how the scales of these rows lie in staging (WireRow).
  constexpr ScaleLayout of_wire() const { return {EPX_SCALES_ROWS, scale_bytes, num_scales, 1}; }

  constexpr bool has_fill() const { return layout == EPX_SCALES_PACKED || layout == EPX_SCALES_TILES; }
  // Returns how many places a row has. Those from S on are filled with 0.
  constexpr int64_t places() const { return has_fill() ? words() * kPerWord : num_scales; }
  // A row's place is at the sum of these two offsets, in bytes.
  constexpr int64_t row_offset(int64_t row) const {
    switch (layout) {
    case EPX_SCALES_ROWS:
      break;
    case EPX_SCALES_COLUMNS:
      return row * scale_bytes;
    case EPX_SCALES_PACKED:
      return row * kPerWord;
    case EPX_SCALES_TILES:
      return row / kTileRows * words() * kTileRows * kPerWord + row % 32 * 16 + row % kTileRows / 32 * kPerWord;
    }
    return row * num_scales * scale_bytes;
  }
  constexpr int64_t place_offset(int64_t place) const {
    switch (layout) {
    case EPX_SCALES_ROWS:
      break;
    case EPX_SCALES_COLUMNS:
      return place * leading_dimension() * scale_bytes;
    case EPX_SCALES_PACKED:
      return place / kPerWord * leading_dimension() * kPerWord + place % kPerWord;
    case EPX_SCALES_TILES:
      return place / kPerWord * kTileRows * kPerWord + place % kPerWord;
    }
    return place * scale_bytes;
  }
  constexpr int64_t offset(int64_t row, int64_t place) const { return row_offset(row) + place_offset(place); }

  // Return the sizes of the tensor.
  constexpr int64_t words() const { return (num_scales + kPerWord - 1) / kPerWord; } // of a row
  constexpr int64_t leading_dimension() const { return (rows + 3) / 4 * 4; }
  constexpr int64_t row_tiles() const { return (rows + kTileRows - 1) / kTileRows; }
};

} // namespace epx
