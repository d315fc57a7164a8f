// SPDX-License-Identifier: Apache-2.0
// GatherParams has the parameters of the kernels of combine and dispatch_bwd.
#pragma once

#include "runtime/stages/cuda/movement.cuh"

namespace epx::cuda {

struct GatherTensors {
  const std::byte* rows;     // [N, H]
  const float* row_weights;  // [N]; applied in the sum; may be NULL
  const float* weight_grads; // dispatch_bwd: [N], rank-major [P, M, K]; sent home beside the rows; NULL: none
  std::byte* out;            // [T, H]; NULL: a leg's, which waits for what the sums are made of, and makes none
  float* weight_grads_out;   // [T, K]; NULL iff weight_grads is
};

struct GatherParams : MovementParams, GatherTensors {};

} // namespace epx::cuda
