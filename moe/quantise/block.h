// SPDX-License-Identifier: Apache-2.0
// The blocks of quantisers and of products in FP8, and where the scales of columns are.
#pragma once

#include <cstdint>

namespace epx::moe {

inline constexpr int kQuantiseBlock = 128; // elements that have a scale in common, along a row or a column

// The scales of columns: those of block b of a zone are row first_zone_block() + b of their tensor. So a block is found without
// the counts of other zones, wherever zones begin. No two blocks share a row: a zone of r rows from row o on needs ceil(r / 128)
// of them, and there are floor((o + r) / 128) - floor(o / 128) + 1 until those of its successor, which are no fewer.
constexpr int64_t first_zone_block(int64_t first_row, int64_t zone) {
  return first_row / kQuantiseBlock + zone;
}
// Returns the rows of the tensor.
constexpr int64_t num_zone_blocks(int64_t num_rows, int64_t num_zones) {
  return first_zone_block(num_rows, num_zones);
}

} // namespace epx::moe
