// SPDX-License-Identifier: Apache-2.0
// Weights to E4M3, in blocks of 128 x 128, and what was quantised so to its transpose. Arguments have been checked. The same
// struct describes a call on the host and to the kernel.
#pragma once

#include <cstdint>

#include "epx/epx.h"
#include "moe/quantise/block.h"
#include "runtime/formats/row_format.h"

namespace epx::moe {

struct QuantiseWeights {
  WireFormat format;   // scales are float32
  epx_dtype dtype;     // of weights
  const void* weights; // [num_matrices, R, C]
  int64_t num_matrices;
  int64_t num_rows;    // R, a multiple of kQuantiseBlock, as C
  int64_t num_columns; // C
  // Two of them are NULL where the other two alone are wanted.
  uint8_t* codes;            // [num_matrices, R, C]
  float* scales;             // [num_matrices, R / 128, C / 128]
  uint8_t* transposed_codes; // [num_matrices, C, R]
  float* transposed_scales;  // [num_matrices, C / 128, R / 128]
};

struct TransposeWeights {
  int64_t num_matrices;
  int64_t num_rows;          // R, a multiple of kQuantiseBlock, as C
  int64_t num_columns;       // C
  const uint8_t* codes;      // [num_matrices, R, C]
  const float* scales;       // [num_matrices, R / 128, C / 128]
  uint8_t* transposed_codes; // [num_matrices, C, R]
  float* transposed_scales;  // [num_matrices, C / 128, R / 128]
};

// Compute on the host.
void quantise(const QuantiseWeights& call);
void transpose(const TransposeWeights& call);

} // namespace epx::moe
