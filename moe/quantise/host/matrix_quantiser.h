// SPDX-License-Identifier: Apache-2.0
// Quantises a matrix on the host, a block of rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "epx/epx.h"
#include "moe/quantise/host/row_blocks.h"
#include "moe/quantise/matrix.h"
#include "runtime/stages/host/rows/rows.h"

namespace epx::moe {

class MatrixQuantiser {
public:
  // The matrix must outlive it.
  explicit MatrixQuantiser(const QuantisedMatrix& matrix);

  // `rows`: the block's rows, which follow each other, of FLOAT32, FLOAT16 or BFLOAT16.
  void quantise(const RowBlock& block, epx_dtype dtype, const std::byte* rows);

private:
  void quantise_rows(const RowBlock& block, epx_dtype dtype, const std::byte* rows);
  template <typename Bits>
  void quantise_columns(const RowBlock& block, epx_dtype dtype, const std::byte* rows);

  const rows::RowKernels& kernels_ = rows::row_kernels();
  const QuantisedMatrix& matrix_;
  std::vector<std::byte> row_scales_; // [S]
};

} // namespace epx::moe
