// SPDX-License-Identifier: Apache-2.0
// Properties of dtypes, for host and device.
#pragma once

#include <cstdint>
#include <optional>

#include "epx/epx.h"

namespace epx {

// Returns the bytes of an element, or 0 for EPX_DTYPE_UNSET and for values that are no dtype. It is for what addresses single
// elements, and for alignments; rows are counted by row_bytes().
constexpr int64_t single_element_bytes(epx_dtype dtype) {
  switch (dtype) {
  case EPX_DTYPE_UNSET:
    return 0;
  case EPX_FLOAT32:
  case EPX_INT32:
    return 4;
  case EPX_FLOAT16:
  case EPX_BFLOAT16:
    return 2;
  case EPX_INT64:
  case EPX_FLOAT64:
    return 8;
  case EPX_UINT8:
  case EPX_FLOAT8_E4M3:
  case EPX_FLOAT8_E5M2:
  case EPX_FLOAT8_E8M0:
  case EPX_FLOAT4_E2M1: // two of them
    return 1;
  }
  return 0;
}

// Returns how many elements share a byte; 1 where none do.
constexpr int64_t elements_per_byte(epx_dtype dtype) {
  return dtype == EPX_FLOAT4_E2M1 ? 2 : 1;
}

// Returns the bytes of a row of `hidden` elements without padding. This function and the next one compute every byte count of
// rows: where a dtype is narrower than a byte, no multiple of an element's bytes would be right.
constexpr int64_t row_bytes(epx_dtype dtype, int64_t hidden) {
  // Not a division by elements_per_byte(): kernels of few tokens would spend tenths of a microsecond on it.
  return (elements_per_byte(dtype) == 2 ? (hidden + 1) / 2 : hidden) * single_element_bytes(dtype);
}

// Returns the bytes of `rows` rows; none when they are more than 2^63 - 1.
inline std::optional<int64_t> checked_bytes_of_rows(epx_dtype dtype, int64_t rows, int64_t hidden) {
  int64_t bytes = 0;
  const int64_t per_byte = elements_per_byte(dtype);
  if (rows > 0 &&
      (__builtin_mul_overflow(hidden / per_byte + (hidden % per_byte != 0 ? 1 : 0), single_element_bytes(dtype), &bytes) ||
       __builtin_mul_overflow(rows, bytes, &bytes)))
    return std::nullopt;
  return bytes;
}

// Returns whether rows of the dtype are summed.
constexpr bool is_token_dtype(epx_dtype dtype) {
  return dtype == EPX_FLOAT32 || dtype == EPX_FLOAT16 || dtype == EPX_BFLOAT16;
}

// Returns whether rows of the dtype have scales beside them.
constexpr bool is_quantised_dtype(epx_dtype dtype) {
  return dtype == EPX_FLOAT8_E4M3 || dtype == EPX_FLOAT8_E5M2 || dtype == EPX_FLOAT4_E2M1;
}

} // namespace epx
