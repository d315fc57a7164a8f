// SPDX-License-Identifier: Apache-2.0
// The row kernels of libepx as a library that ctypes can load (row_kernels.py).
#include <cstddef>
#include <cstdint>

#include "runtime/formats/row_format.h"
#include "runtime/stages/host/rows/rows.h"

#define EPX_TEST_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

epx::WireFormat row_format(const int32_t* format, float amax_floor) {
  return {static_cast<epx_scaling>(format[0]), static_cast<epx_dtype>(format[1]), static_cast<epx_dtype>(format[2]),
          amax_floor};
}

} // namespace

EPX_TEST_EXPORT const char* instruction_set(int index) {
  return index < epx::rows::num_row_kernels() ? epx::rows::row_kernels(index).instruction_set : nullptr;
}

// `format`: scaling, dtype of elements, dtype of scales. The arrays are [num_rows, ...] without gaps.
EPX_TEST_EXPORT void quantise_rows(int index, const int32_t* format, float amax_floor, int32_t in, const std::byte* rows,
                                   int64_t num_rows, int64_t hidden, const float* encode_scale, std::byte* elements,
                                   std::byte* scales, float* row_scales) {
  const epx::WireFormat wire = row_format(format, amax_floor);
  const auto dtype = static_cast<epx_dtype>(in);
  for (int64_t row = 0; row < num_rows; ++row)
    epx::rows::row_kernels(index).quantise(wire, dtype, rows + row * epx::row_bytes(dtype, hidden), hidden, encode_scale,
                                           elements + row * wire.element_bytes(hidden),
                                           scales + row * wire.scale_bytes(hidden), row_scales + row);
}

EPX_TEST_EXPORT void dequantise_rows(int index, const int32_t* format, int32_t out, const std::byte* elements,
                                     const std::byte* scales, const float* row_scales, int64_t num_rows, int64_t hidden,
                                     std::byte* rows) {
  const epx::WireFormat wire = row_format(format, 0.0f);
  const auto dtype = static_cast<epx_dtype>(out);
  for (int64_t row = 0; row < num_rows; ++row)
    epx::rows::row_kernels(index).dequantise(wire, dtype, elements + row * wire.element_bytes(hidden),
                                             scales + row * wire.scale_bytes(hidden), row_scales[row], nullptr, hidden,
                                             rows + row * epx::row_bytes(dtype, hidden));
}
