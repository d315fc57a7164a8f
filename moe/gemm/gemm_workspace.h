// SPDX-License-Identifier: Apache-2.0
// Which grouped products may use tensor cores, and the memory that they take for it. Every build must know this, so this header
// needs neither CUDA nor CUTLASS.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "epx/epx.h"
#include "moe/cuda/launch_target.h"
#include "moe/quantise/block.h"

namespace epx::moe {

inline constexpr size_t kTmaAlignment = 16; // bytes; of addresses and strides

// Whether TMA can read and write rows of `hidden`, `inner` and 2 * inner elements: their bytes are multiples of
// kTmaAlignment. Rows of FLOAT8_E4M3 are whole blocks, and their columns have num_rows bytes, likewise a multiple; where zones
// begin, which must be one, too, is known on the device only. The sizes of a product are int32 in CUTLASS.
constexpr bool fits_tensor_cores(epx_dtype dtype, int64_t hidden, int64_t inner, int64_t num_rows) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  if (hidden > kMaxSize || 2 * inner > kMaxSize || num_rows > kMaxSize) return false;
  if (dtype == EPX_FLOAT8_E4M3)
    return hidden % kQuantiseBlock == 0 && inner % kQuantiseBlock == 0 &&
           num_rows % static_cast<int64_t>(kTmaAlignment) == 0;
  constexpr int64_t kElements = kTmaAlignment / 2; // of BFLOAT16
  return dtype == EPX_BFLOAT16 && hidden % kElements == 0 && inner % kElements == 0;
}

// What CUTLASS makes for each SM: the tensormaps of a, of b, of d as it is read, and of d for each of two warp groups.
inline constexpr int kMaxSmsOfSm90 = 144; // of a full GH100
inline constexpr size_t kTensormapBytes = 128;
inline constexpr size_t kTensormapsBytes = size_t{kMaxSmsOfSm90} * 5 * kTensormapBytes;

// Three addresses, three strides and three sizes of each expert's product.
inline constexpr size_t kGroupBytes = 3 * sizeof(void*) + 3 * sizeof(int64_t) + 3 * sizeof(int32_t);

// The workspace of the products of one call, which use it one after the other: of CUTLASS's, or of weight gradients in
// FLOAT8_E4M3 the tensormaps of a and b for each expert.
constexpr size_t tensor_core_workspace_bytes(int num_experts) {
  if (num_experts == 0) return 0;
  const auto experts = static_cast<size_t>(num_experts);
  return std::max(kTensormapsBytes + round_up_workspace(experts * kGroupBytes),
                  round_up_workspace(experts * 2 * kTensormapBytes));
}

} // namespace epx::moe
