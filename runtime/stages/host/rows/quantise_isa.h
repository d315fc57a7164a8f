// SPDX-License-Identifier: Apache-2.0
// What quantise_isa.cc gives to rows_isa.cc of the same instruction set: see RowKernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx.h"
#include "runtime/formats/row_format.h"

namespace epx::rows {
inline namespace EPX_ROWS_ISA {

void quantise(const WireFormat& format, epx_dtype in, const std::byte* row, int64_t hidden, const float* encode_scale,
              std::byte* elements, std::byte* scales, float* row_scale);

void dequantise(const WireFormat& format, epx_dtype out, const std::byte* elements, const std::byte* scales,
                float row_scale, const float* weight, int64_t hidden, std::byte* row);

} // namespace EPX_ROWS_ISA
} // namespace epx::rows
