// SPDX-License-Identifier: Apache-2.0
// Names of the C API's enumerators, and lists of ranks, for messages.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "base/operations.h"
#include "epx/epx.h"

namespace epx {

constexpr const char* name_of(epx_status status) {
  switch (status) {
  case EPX_SUCCESS:
    return "EPX_SUCCESS";
  case EPX_ERROR_INVALID_ARGUMENT:
    return "EPX_ERROR_INVALID_ARGUMENT";
  case EPX_ERROR_UNSUPPORTED:
    return "EPX_ERROR_UNSUPPORTED";
  case EPX_ERROR_MISMATCH:
    return "EPX_ERROR_MISMATCH";
  case EPX_ERROR_OUT_OF_MEMORY:
    return "EPX_ERROR_OUT_OF_MEMORY";
  case EPX_ERROR_SYSTEM:
    return "EPX_ERROR_SYSTEM";
  case EPX_ERROR_TIMEOUT:
    return "EPX_ERROR_TIMEOUT";
  case EPX_ERROR_ABORTED:
    return "EPX_ERROR_ABORTED";
  case EPX_ERROR_OUT_OF_SEQUENCE:
    return "EPX_ERROR_OUT_OF_SEQUENCE";
  case EPX_ERROR_INTERNAL:
    return "EPX_ERROR_INTERNAL";
  }
  return "unknown status";
}

constexpr const char* name_of(epx_operation operation) {
  switch (operation) {
  case EPX_OP_NONE:
    return "none";
#define EPX_CASE(NUMBER, name, ...)                                                                                        \
  case EPX_OP_##NUMBER:                                                                                                    \
    return #name;
    EPX_OPERATIONS(EPX_CASE)
    EPX_HOST_CALLS(EPX_CASE)
#undef EPX_CASE
  }
  return "unknown operation";
}

constexpr const char* name_of(epx_dtype dtype) {
  switch (dtype) {
  case EPX_DTYPE_UNSET:
    return "unset";
  case EPX_FLOAT32:
    return "float32";
  case EPX_FLOAT16:
    return "float16";
  case EPX_BFLOAT16:
    return "bfloat16";
  case EPX_INT32:
    return "int32";
  case EPX_INT64:
    return "int64";
  case EPX_FLOAT64:
    return "float64";
  case EPX_UINT8:
    return "uint8";
  case EPX_FLOAT8_E4M3:
    return "float8_e4m3";
  case EPX_FLOAT8_E5M2:
    return "float8_e5m2";
  case EPX_FLOAT4_E2M1:
    return "float4_e2m1";
  case EPX_FLOAT8_E8M0:
    return "float8_e8m0";
  }
  return "unknown dtype";
}

constexpr const char* name_of(epx_scaling scaling) {
  switch (scaling) {
  case EPX_SCALING_NONE:
    return "none";
  case EPX_SCALING_BLOCK128:
    return "block128";
  case EPX_SCALING_BLOCK128_POW2:
    return "block128_pow2";
  case EPX_SCALING_MX:
    return "mx";
  case EPX_SCALING_NV:
    return "nv";
  }
  return "unknown scaling";
}

constexpr const char* name_of(epx_scale_layout layout) {
  switch (layout) {
  case EPX_SCALES_ROWS:
    return "rows";
  case EPX_SCALES_COLUMNS:
    return "columns";
  case EPX_SCALES_PACKED:
    return "packed";
  case EPX_SCALES_TILES:
    return "tiles";
  }
  return "unknown layout";
}

constexpr const char* name_of(epx_transport transport) {
  switch (transport) {
  case EPX_TRANSPORT_AUTO:
    return "auto";
  case EPX_TRANSPORT_HOST:
    return "host";
  case EPX_TRANSPORT_NCCL:
    return "nccl";
  }
  return "unknown transport";
}

constexpr const char* name_of(epx_combine_precision precision) {
  switch (precision) {
  case EPX_COMBINE_WIRE:
    return "wire";
  case EPX_COMBINE_EXACT:
    return "exact";
  case EPX_COMBINE_NODE:
    return "node";
  }
  return "unknown precision";
}

constexpr const char* name_of(epx_overflow overflow) {
  switch (overflow) {
  case EPX_OVERFLOW_ERROR:
    return "error";
  case EPX_OVERFLOW_DROP:
    return "drop";
  }
  return "unknown overflow policy";
}

constexpr const char* name_of(epx_phase phase) {
  switch (phase) {
  case EPX_PHASE_NONE:
    return "none";
  case EPX_PHASE_ARRIVE:
    return "arrive";
  case EPX_PHASE_COMPLETE:
    return "complete";
  }
  return "unknown phase";
}

// Returns "rank 2" or "ranks 0, 2, 5".
inline std::string name_ranks(std::span<const int> ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

} // namespace epx
