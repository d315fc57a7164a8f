// SPDX-License-Identifier: Apache-2.0
// The grouped FFN in FP8: its calls as typed memory, their workspace, and the steps that compute them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx_moe.h"
#include "moe/ffn/ffn.h"
#include "moe/ffn/fp8/ops.h"
#include "moe/ffn/params.h"

namespace epx::moe {

// Where zones begin, and the rows that tensors have, are multiples of this: TMA reads columns from such addresses alone.
inline constexpr int64_t kFp8ZoneAlignment = 16;

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

// The bytes of scratch memory, aligned to kWorkspaceAlignment, that the steps take.
size_t fp8_fwd_bytes(const FfnShape& shape, epx_dtype wide, int64_t num_rows, bool has_pre_act);
size_t fp8_bwd_bytes(const FfnShape& shape, epx_dtype wide, int64_t num_rows, epx_moe_recipe recipe);

// The part of it that the products on a GPU use; NULL where they do not fit tensor cores, or without memory.
void* fp8_products_workspace(const FfnShape& shape, int64_t num_rows, std::byte* scratch);

void run(const FfnShape& shape, const Fp8Forward& call, const Fp8Ops& ops, std::byte* scratch);
void run(const FfnShape& shape, const Fp8Backward& call, const Fp8Ops& ops, std::byte* scratch);

} // namespace epx::moe
