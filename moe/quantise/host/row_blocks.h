// SPDX-License-Identifier: Apache-2.0
// The blocks of rows of a matrix that is quantised on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/quantise/matrix.h"

namespace epx::moe {

// Rows of a zone that have scales in common along their columns, and the pads of the zone that complete the block.
struct RowBlock {
  int64_t index; // of the row of column_scales
  int64_t first_row;
  int64_t num_rows;
  int64_t num_pads;
};

template <typename Visit>
void for_each_block(const RowZones& zones, const Visit& visit) {
  for (int zone = 0; zone < zones.num_zones; ++zone) {
    const int64_t first = zones.are_given ? zones.offsets[zone] : 0;
    const int64_t end = zones.are_given ? zones.offsets[zone + 1] : zones.num_rows;
    const int64_t rows = zones.are_given ? zones.counts[zone] : zones.num_rows;
    for (int64_t at = 0; at < rows; at += kQuantiseBlock) {
      const int64_t in_block = std::min<int64_t>(rows - at, kQuantiseBlock);
      const int64_t pads = std::min(end - first - at - in_block, kQuantiseBlock - in_block);
      visit(RowBlock{first_zone_block(first, zone) + at / kQuantiseBlock, first + at, in_block, pads});
    }
  }
}

} // namespace epx::moe
