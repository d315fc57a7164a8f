// SPDX-License-Identifier: Apache-2.0
// Weights in MX or NV: the rows of a matrix, and those of the transposed one, are quantised as rows that travel are.
// Arguments have been checked. The same struct describes a call on the host and to the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx.h"
#include "moe/quantise/block.h"
#include "runtime/formats/row_format.h"
#include "runtime/formats/scale_layout.h"

namespace epx::moe {

// What the rows of all matrices become in one orientation.
struct WeightRows {
  std::byte* codes; // NULL: not wanted
  std::byte* scales;
  float* row_scales; // NV only
  ScaleLayout layout;
};

struct QuantiseWeightRows {
  WireFormat format;
  epx_dtype dtype;     // of weights
  const void* weights; // [num_matrices, R, C]
  int64_t num_matrices;
  int64_t num_rows;      // R, a multiple of kQuantiseBlock, as C
  int64_t num_columns;   // C
  WeightRows given;      // of num_matrices * R rows
  WeightRows transposed; // of num_matrices * C rows
};

// Computes on the host.
void quantise(const QuantiseWeightRows& call);

} // namespace epx::moe
