// SPDX-License-Identifier: Apache-2.0
// GatherParams has the parameters of the kernels of combine and dispatch_bwd.
#pragma once

#include "runtime/stages/cuda/movement.cuh"

namespace epx::cuda {

struct GatherTensors {
  const std::byte* rows;        // [N, H]
  const float* row_weights;     // [N]; applied in the sum; may be NULL
  const float* carried_weights; // [N]; carried home beside the rows; may be NULL
  std::byte* out;               // [T, H]
  float* carried_out;           // [T, K]; NULL iff carried_weights is
};

struct GatherParams : MovementParams, GatherTensors {};

} // namespace epx::cuda
