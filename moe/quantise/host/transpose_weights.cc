// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "moe/quantise/weights.h"

namespace epx::moe {
namespace {

// Transposes a block of kQuantiseBlock rows and columns. `from` and `to` are its first codes.
void transpose_block(const TransposeWeights& call, const uint8_t* from, uint8_t* to) {
  for (int64_t c = 0; c < kQuantiseBlock; ++c)
    for (int64_t r = 0; r < kQuantiseBlock; ++r)
      to[c * call.num_rows + r] = from[r * call.num_columns + c];
}

} // namespace

void transpose(const TransposeWeights& call) {
  const int64_t row_blocks = call.num_rows / kQuantiseBlock;
  const int64_t column_blocks = call.num_columns / kQuantiseBlock;
  for (int64_t matrix = 0; matrix < call.num_matrices; ++matrix) {
    const int64_t first_code = matrix * call.num_rows * call.num_columns;
    const int64_t first_scale = matrix * row_blocks * column_blocks;
    for (int64_t row = 0; row < row_blocks; ++row)
      for (int64_t column = 0; column < column_blocks; ++column) {
        transpose_block(call, call.codes + first_code + (row * call.num_columns + column) * kQuantiseBlock,
                        call.transposed_codes + first_code + (column * call.num_rows + row) * kQuantiseBlock);
        call.transposed_scales[first_scale + column * row_blocks + row] =
            call.scales[first_scale + row * column_blocks + column];
      }
  }
}

} // namespace epx::moe
