// SPDX-License-Identifier: Apache-2.0
// The row kernels quantise: a column of a block is a row to them.
#include "moe/quantise/host/matrix_quantiser.h"

#include <algorithm>
#include <cstring>

#include "base/dtypes.h"

namespace epx::moe {

MatrixQuantiser::MatrixQuantiser(const QuantisedMatrix& matrix)
    : matrix_(matrix), row_scales_(static_cast<size_t>(matrix.row_format.scale_bytes(matrix.num_columns))) {}

void MatrixQuantiser::quantise(const RowBlock& block, epx_dtype dtype, const std::byte* rows) {
  if (matrix_.row_codes != nullptr) quantise_rows(block, dtype, rows);
  if (matrix_.column_codes == nullptr) return;
  if (single_element_bytes(dtype) == 4)
    quantise_columns<uint32_t>(block, dtype, rows);
  else
    quantise_columns<uint16_t>(block, dtype, rows);
}

void MatrixQuantiser::quantise_rows(const RowBlock& block, epx_dtype dtype, const std::byte* rows) {
  const int64_t bytes_of_row = row_bytes(dtype, matrix_.num_columns);
  const ScaleLayout& layout = matrix_.row_scale_layout;
  const auto scale_bytes = static_cast<size_t>(layout.scale_bytes);
  for (int64_t i = 0; i < block.num_rows + block.num_pads; ++i) {
    const int64_t row = block.first_row + i;
    uint8_t* const codes = matrix_.row_codes + row * matrix_.num_columns;
    if (i < block.num_rows) {
      float unused = 0.0f;
      kernels_.quantise(matrix_.row_format, dtype, rows + i * bytes_of_row, matrix_.num_columns, nullptr,
                        reinterpret_cast<std::byte*>(codes), row_scales_.data(), &unused);
    } else {
      std::memset(codes, 0, static_cast<size_t>(matrix_.num_columns));
      std::ranges::fill(row_scales_, std::byte{0});
    }
    for (int64_t s = 0; s < layout.num_scales; ++s)
      std::memcpy(matrix_.row_scales + layout.offset(row, s), row_scales_.data() + static_cast<size_t>(s) * scale_bytes,
                  scale_bytes);
    for (int64_t s = layout.num_scales; s < layout.places(); ++s)
      matrix_.row_scales[layout.offset(row, s)] = std::byte{0};
  }
}

// Bits: of an element. A tile of columns at a time, so that the rows are read from memory once.
template <typename Bits>
void MatrixQuantiser::quantise_columns(const RowBlock& block, epx_dtype dtype, const std::byte* rows) {
  const int64_t bytes_of_row = row_bytes(dtype, matrix_.num_columns);
  const WireFormat format = matrix_.column_format();
  std::vector<Bits> tile(static_cast<size_t>(kQuantiseBlock) * kQuantiseBlock); // [columns, rows]
  for (int64_t first = 0; first < matrix_.num_columns; first += kQuantiseBlock) {
    for (int64_t i = 0; i < block.num_rows; ++i) {
      const Bits* const row = reinterpret_cast<const Bits*>(rows + i * bytes_of_row) + first;
      for (int64_t j = 0; j < kQuantiseBlock; ++j)
        tile[static_cast<size_t>(j * kQuantiseBlock + i)] = row[j];
    }
    for (int64_t j = 0; j < kQuantiseBlock; ++j) {
      uint8_t* const codes = matrix_.column_codes + (first + j) * matrix_.num_rows + block.first_row;
      float unused = 0.0f;
      kernels_.quantise(format, dtype, reinterpret_cast<const std::byte*>(&tile[static_cast<size_t>(j * kQuantiseBlock)]),
                        block.num_rows, nullptr, reinterpret_cast<std::byte*>(codes),
                        reinterpret_cast<std::byte*>(matrix_.column_scales + block.index * matrix_.num_columns + first + j),
                        &unused);
      std::memset(codes + block.num_rows, 0, static_cast<size_t>(block.num_pads));
    }
  }
}

} // namespace epx::moe
