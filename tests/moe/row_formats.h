// SPDX-License-Identifier: Apache-2.0
// Row formats for blocks, and what arrives of the tokens that travel in them: the oracle says it.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "epx/epx.hpp"
#include "runtime/reference/formats.h"
#include "tests/moe/tensors.h"

namespace epx::test {

// Each scaling with each dtype that it has.
inline std::vector<epx_row_format> wire_formats() {
  std::vector<epx_row_format> formats;
  for (const epx_scaling scaling : {EPX_SCALING_BLOCK128, EPX_SCALING_BLOCK128_POW2, EPX_SCALING_MX, EPX_SCALING_NV})
    formats.push_back(RowFormat(scaling).get());
  formats.push_back(RowFormat(EPX_SCALING_MX).get());
  formats.back().dtype = EPX_FLOAT8_E5M2;
  return formats;
}

// Returns tokens [T, H], quantised and dequantised.
inline Tensor<float> as_they_arrive(const epx_row_format& format, const Tensor<float>& tokens) {
  const epx_dtype scales = format.scaling == EPX_SCALING_BLOCK128 ? EPX_FLOAT32
                           : format.scaling == EPX_SCALING_NV     ? EPX_FLOAT8_E4M3
                                                                  : EPX_FLOAT8_E8M0;
  const reference::Format oracle = {format.scaling, format.dtype, scales, format.amax_floor};
  reference::Matrix rows = {EPX_FLOAT32, tokens.size(0), tokens.size(1), {}};
  rows.bytes.resize(static_cast<size_t>(tokens.count()) * sizeof(float));
  for (int64_t i = 0; i < tokens.count(); ++i)
    std::memcpy(rows.bytes.data() + static_cast<size_t>(i) * sizeof(float), &tokens[i], sizeof(float));
  rows = reference::dequantise(oracle, reference::quantise(oracle, rows), EPX_FLOAT32);
  Tensor<float> arrived({tokens.size(0), tokens.size(1)});
  for (int64_t i = 0; i < arrived.count(); ++i)
    std::memcpy(&arrived[i], rows.bytes.data() + static_cast<size_t>(i) * sizeof(float), sizeof(float));
  return arrived;
}

} // namespace epx::test
