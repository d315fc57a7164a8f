// SPDX-License-Identifier: Apache-2.0
#include "moe/quantise/weights.h"

#include <algorithm>
#include <cstdint>

#include "runtime/formats/elements.h"
#include "runtime/formats/scaling.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/row_types_isa.h"

namespace epx::moe {
namespace {

// Quantises a block of kQuantiseBlock rows and columns.
template <typename Element>
void quantise_block(const QuantiseWeights& call, int64_t matrix, int64_t first_row, int64_t first_column) {
  const int64_t rows = call.num_rows;
  const int64_t columns = call.num_columns;
  const int64_t first_element = matrix * rows * columns;
  const auto* const weights = static_cast<const typename Element::Bits*>(call.weights) + first_element;
  uint32_t amax = 0;
  for (int64_t r = first_row; r < first_row + kQuantiseBlock; ++r)
    for (int64_t c = first_column; c < first_column + kQuantiseBlock; ++c) {
      const uint32_t magnitude = formats::bits_of(Element::load(weights[r * columns + c])) & formats::kMagnitudeBits;
      amax = std::max(amax, magnitude < formats::kInfinityBits ? magnitude : 0);
    }
  const auto scale = formats::scale_block(call.format, formats::float_of(amax), true, 1.0f);
  for (int64_t r = first_row; r < first_row + kQuantiseBlock; ++r)
    for (int64_t c = first_column; c < first_column + kQuantiseBlock; ++c) {
      const auto code =
          static_cast<uint8_t>(formats::encode<formats::E4M3>(Element::load(weights[r * columns + c]) * scale.multiplier));
      if (call.codes != nullptr) call.codes[first_element + r * columns + c] = code;
      if (call.transposed_codes != nullptr) call.transposed_codes[first_element + c * rows + r] = code;
    }
  const int64_t row_blocks = rows / kQuantiseBlock;
  const int64_t column_blocks = columns / kQuantiseBlock;
  const int64_t row_block = first_row / kQuantiseBlock;
  const int64_t column_block = first_column / kQuantiseBlock;
  const int64_t first_scale = matrix * row_blocks * column_blocks;
  const float value = formats::float_of(scale.stored);
  if (call.codes != nullptr) call.scales[first_scale + row_block * column_blocks + column_block] = value;
  if (call.transposed_codes != nullptr) call.transposed_scales[first_scale + column_block * row_blocks + row_block] = value;
}

template <typename Element>
void quantise_matrices(const QuantiseWeights& call) {
  for (int64_t matrix = 0; matrix < call.num_matrices; ++matrix)
    for (int64_t row = 0; row < call.num_rows; row += kQuantiseBlock)
      for (int64_t column = 0; column < call.num_columns; column += kQuantiseBlock)
        quantise_block<Element>(call, matrix, row, column);
}

} // namespace

void quantise(const QuantiseWeights& call) {
  const host::DefaultFloatEnvironment environment;
  rows::with_format(call.dtype, [&]<typename Element>(Element) { quantise_matrices<Element>(call); });
}

} // namespace epx::moe
