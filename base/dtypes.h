// SPDX-License-Identifier: Apache-2.0
// Properties of dtypes, for host and device.
#pragma once

#include <cstdint>

#include "epx/epx.h"

namespace epx {

// Returns the bytes of an element, or 0 for EPX_DTYPE_UNSET and for values that are no dtype.
constexpr int64_t element_bytes(epx_dtype dtype) {
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
    return 1;
  }
  return 0;
}

constexpr bool is_token_dtype(epx_dtype dtype) {
  return dtype == EPX_FLOAT32 || dtype == EPX_FLOAT16 || dtype == EPX_BFLOAT16;
}

} // namespace epx
