// SPDX-License-Identifier: Apache-2.0
#include "moe/quantise/dequantise.h"

#include <cstddef>

#include "moe/quantise/host/row_blocks.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/rows.h"

namespace epx::moe {

void dequantise(const DequantiseRows& call) {
  const host::DefaultFloatEnvironment environment;
  const int64_t columns = call.num_columns;
  for_each_block(call.zones, [&](const RowBlock& block) {
    for (int64_t row = block.first_row; row < block.first_row + block.num_rows; ++row)
      rows::row_kernels().dequantise(
          kBlock128WithoutFloor, call.dtype, reinterpret_cast<const std::byte*>(call.codes + row * columns),
          reinterpret_cast<const std::byte*>(call.scales + row * (columns / kQuantiseBlock)), 0.0f, nullptr, columns,
          static_cast<std::byte*>(call.rows) + row * row_bytes(call.dtype, columns));
  });
}

} // namespace epx::moe
