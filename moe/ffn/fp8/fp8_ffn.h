// SPDX-License-Identifier: Apache-2.0
// The grouped FFN in FP8: its calls as typed memory, their workspace, and the steps that compute them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx_moe.h"
#include "moe/ffn/ffn.h"
#include "moe/ffn/fp8/ops.h"
#include "moe/ffn/params.h"
#include "moe/gemm/gemm_workspace.h"

namespace epx::moe {

// TMA reads columns of zones that begin at multiples of this; the rows that tensors have are always a multiple of it.
inline constexpr int64_t kFp8ZoneAlignment = kTmaAlignment; // rows, whose codes in a column are bytes

struct Fp8Forward {
  Fp8Weights gate_up, down;
  Fp8Rows tokens;
  const float* recv_weights; // NULL: all 1
  void* pre_act;             // wide [N, 2F]; NULL: not wanted
  void* expert_out;          // wide [N, H]; NULL: pre_act alone is computed
};

struct Fp8Backward {
  Fp8Weights gate_up_transposed, down_transposed;
  Fp8Rows tokens, grad_expert_out;
  const float* recv_weights; // NULL: all 1
  const void* pre_act;       // wide [N, 2F]
  void* grad_recv;           // wide [N, H]
  float* grad_recv_weights;  // NULL: not wanted
  ParamTensor grad_gate_up, grad_down;
  bool accumulate;
  epx_moe_recipe recipe;
};

// The bytes of scratch memory that the steps take: on a GPU a workspace.
size_t fp8_fwd_bytes(const FfnShape& shape, epx_dtype wide, int64_t num_rows, bool has_pre_act);
size_t fp8_bwd_bytes(const FfnShape& shape, epx_dtype wide, int64_t num_rows, epx_moe_recipe recipe);

// The part of it that the products on a GPU use; NULL where they do not fit tensor cores, or without memory.
void* fp8_products_workspace(const FfnShape& shape, int64_t num_rows, std::byte* scratch);

void run(const FfnShape& shape, const Fp8Forward& call, const Fp8Ops& ops, std::byte* scratch);
void run(const FfnShape& shape, const Fp8Backward& call, const Fp8Ops& ops, std::byte* scratch);

} // namespace epx::moe
