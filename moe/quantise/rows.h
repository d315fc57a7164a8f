// SPDX-License-Identifier: Apache-2.0
// Rows to E4M3. Arguments have been checked.
#pragma once

#include "epx/epx.h"
#include "moe/quantise/matrix.h"

namespace epx::moe {

struct QuantiseRows {
  RowZones zones;
  epx_dtype dtype;     // of rows
  const void* rows;    // as the matrix
  const float* scales; // of E4M3 rows, in scale_layout; else NULL
  ScaleLayout scale_layout;
  QuantisedMatrix matrix;
};

// Computes on the host.
void quantise(const QuantiseRows& call);

} // namespace epx::moe
