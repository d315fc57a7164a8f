// SPDX-License-Identifier: Apache-2.0
// SwiGLU and its backward, whose outputs are quantised. Arguments have been checked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx.h"
#include "moe/quantise/matrix.h"

namespace epx::moe {

struct QuantiseSwiglu {
  RowZones zones;
  epx_dtype dtype;           // of pre_act: FLOAT32 or BFLOAT16
  const void* pre_act;       // [N, 2F]
  const float* recv_weights; // [N]; NULL: all 1
  QuantisedMatrix h;         // [N, F]
};

struct QuantiseSwigluBwd {
  RowZones zones;
  epx_dtype dtype;           // of pre_act and grad_h: FLOAT32 or BFLOAT16
  const void* pre_act;       // [N, 2F]
  const void* grad_h;        // [N, F]
  const float* recv_weights; // [N]; NULL: all 1
  QuantisedMatrix grads;     // [N, 2F]: of pre_act
  QuantisedMatrix h;         // [N, F]: columns alone
  float* grad_recv_weights;  // [N]; NULL: not wanted
  float* tile_sums;          // [F / 128, N], on CUDA where grad_recv_weights is wanted: each tile's part of them
};

// Returns the bytes of tile_sums, for a call that wants grad_recv_weights of so many rows.
constexpr size_t tile_sums_bytes(int64_t num_rows, int64_t inner) {
  return static_cast<size_t>(num_rows) * static_cast<size_t>(inner / kQuantiseBlock) * sizeof(float);
}

// Compute on the host.
void quantise(const QuantiseSwiglu& call);
void quantise(const QuantiseSwigluBwd& call);

} // namespace epx::moe
