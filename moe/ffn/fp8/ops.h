// SPDX-License-Identifier: Apache-2.0
// The steps that the grouped FFN in FP8 is made of, on the host or on a GPU. Tensors are of the experts' side: their rows
// lie in zones, and rows that belong to no zone are neither read nor written. "Wide" is FLOAT32 on the host and BFLOAT16 on
// a GPU.
#pragma once

#include <cstdint>

#include "moe/ffn/params.h"
#include "moe/quantise/matrix.h"
#include "moe/quantise/rows.h"
#include "moe/quantise/swiglu.h"

namespace epx::moe {

// Of FLOAT8_E4M3, as epx_moe_quantise_rows writes them.
struct Fp8Rows {
  uint8_t* codes; // [N, columns]
  float* scales;  // [N, columns / 128]
  int64_t columns;
};
struct Fp8Columns {
  uint8_t* codes; // [columns, N]
  float* scales;  // [num_zone_blocks(), columns]
  int64_t columns;
};
struct Fp8Weights {
  const uint8_t* codes; // [E_l, n, k]
  const float* scales;  // [E_l, n / 128, k / 128]
};
struct WideRows {
  void* data; // [N, columns]
  int64_t columns;
};

// The backward of w_s * silu(gate) * up in wide rows.
struct WideSwigluBwd {
  const void* pre_act;       // [N, 2F]
  const void* grad_h;        // [N, F]
  const float* recv_weights; // [N]; NULL: all 1
  WideRows grad_pre_act;     // 2F columns
  WideRows h;                // F columns: w_s * h
  float* grad_recv_weights;  // [N]; NULL: not wanted
};

class Fp8Ops {
public:
  Fp8Ops() = default;
  Fp8Ops(const Fp8Ops&) = delete;
  Fp8Ops& operator=(const Fp8Ops&) = delete;
  virtual ~Fp8Ops() = default;

  virtual epx_dtype wide() const = 0;
  virtual const RowZones& zones() const = 0;

  // d = a * b^T of each expert, d.columns = n.
  virtual void multiply(const Fp8Rows& a, const Fp8Weights& b, const WideRows& d) const = 0;
  // grad [E_l, a.columns, b.columns] = a^T * b over the rows of each expert, or that added to grad.
  virtual void weight_gradient(const Fp8Columns& a, const Fp8Columns& b, const ParamTensor& grad,
                               bool accumulate) const = 0;
  virtual void weight_gradient(const WideRows& a, const WideRows& b, const ParamTensor& grad, bool accumulate) const = 0;

  virtual void quantise(const QuantiseRows& call) const = 0;
  virtual void quantise(const QuantiseSwiglu& call) const = 0;
  virtual void quantise(const QuantiseSwigluBwd& call) const = 0;
  virtual void dequantise(const Fp8Rows& rows, const WideRows& wide) const = 0;
  virtual void activate_bwd(const WideSwigluBwd& call) const = 0;
};

} // namespace epx::moe
