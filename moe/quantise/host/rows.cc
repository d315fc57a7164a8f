// SPDX-License-Identifier: Apache-2.0
#include "moe/quantise/rows.h"

#include <cstddef>
#include <vector>

#include "base/dtypes.h"
#include "moe/quantise/host/matrix_quantiser.h"
#include "runtime/stages/host/rows/float_environment.h"

namespace epx::moe {
namespace {

// Dequantises the rows of a block to `values`, [kQuantiseBlock, H].
void dequantise(const QuantiseRows& call, const RowBlock& block, std::vector<float>& values) {
  const ScaleLayout& layout = call.scale_layout;
  const int64_t hidden = call.matrix.num_columns;
  std::vector<float> scales(static_cast<size_t>(layout.num_scales));
  for (int64_t i = 0; i < block.num_rows; ++i) {
    const int64_t row = block.first_row + i;
    for (int64_t s = 0; s < layout.num_scales; ++s)
      scales[static_cast<size_t>(s)] = call.scales[layout.offset(row, s) / layout.scale_bytes];
    rows::row_kernels().dequantise(kBlock128WithoutFloor, EPX_FLOAT32,
                                   static_cast<const std::byte*>(call.rows) + row * hidden,
                                   reinterpret_cast<const std::byte*>(scales.data()), 0.0f, nullptr, hidden,
                                   reinterpret_cast<std::byte*>(values.data() + i * hidden));
  }
}

} // namespace

void quantise(const QuantiseRows& call) {
  const host::DefaultFloatEnvironment environment;
  MatrixQuantiser quantiser(call.matrix);
  const int64_t hidden = call.matrix.num_columns;
  std::vector<float> values(static_cast<size_t>(call.dtype == EPX_FLOAT8_E4M3 ? kQuantiseBlock * hidden : 0));
  for_each_block(call.zones, [&](const RowBlock& block) {
    if (call.dtype != EPX_FLOAT8_E4M3) {
      const std::byte* const rows =
          static_cast<const std::byte*>(call.rows) + block.first_row * row_bytes(call.dtype, hidden);
      quantiser.quantise(block, call.dtype, rows);
      return;
    }
    dequantise(call, block, values);
    quantiser.quantise(block, EPX_FLOAT32, reinterpret_cast<const std::byte*>(values.data()));
  });
}

} // namespace epx::moe
