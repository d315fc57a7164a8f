// SPDX-License-Identifier: Apache-2.0
// Every transport implements these five operations, which are behind the C API. Their arguments have been checked: shapes fit
// the group, and required pointers are not NULL.
//
// There are two movements. *Scatter* carries rows from tokens to slots: dispatch and combine_bwd. *Gather* carries rows
// from slots to tokens and sums them: combine and dispatch_bwd. Weights and gradients are variations of these two.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx.h"

namespace epx {

struct PrepareCall {
  epx_stream stream; // NULL on the host
  int top_k;
  int alignment; // effective, >= 1
  std::byte* handle_mem;
  int64_t num_tokens;   // T
  const void* topk_idx; // [T, K] int32 or int64
  bool topk_idx_is_64;
  void* counts;        // [E_l] int32 or int64
  void* offsets;       // [E_l + 1], as counts
  void* global_counts; // [P, E], as counts; may be NULL
  bool counts_are_64;
  int64_t* info;        // [5]; may be NULL
  int32_t* slot;        // [T, K]; may be NULL
  int32_t* slot_origin; // [R, 3]; may be NULL
};

// The four data movements have these arguments in common.
struct MovementCall {
  epx_stream stream; // NULL on the host
  epx_operation operation;
  int top_k;
  int alignment; // effective, >= 1
  const std::byte* handle_mem;
  int64_t num_tokens; // T
  int64_t recv_rows;  // N
  int hidden;         // H
  epx_dtype dtype;
  const std::byte* checked_header; // handle_mem, or the copy of its header that launch_check makes for a kernel
};

struct DispatchCall : MovementCall {
  const std::byte* tokens; // [T, H]
  int64_t sidecar_bytes;   // per row; 0: none
  const std::byte* sidecar;
  const float* topk_weights; // [T, K]; may be NULL
  std::byte* recv_tokens;    // [N, H]
  std::byte* recv_sidecar;
  float* recv_weights; // [N]; NULL iff topk_weights is
  bool clears_pads;    // EPX_PADS_ZERO
};

struct CombineCall : MovementCall {
  const std::byte* expert_out; // [N, H]
  const float* recv_weights;   // [N]; may be NULL
  std::byte* out;              // [T, H]
};

struct CombineBwdCall : MovementCall {
  const std::byte* grad_out;   // [T, H]
  const std::byte* expert_out; // [N, H]; NULL iff grad_recv_weights is
  const float* recv_weights;   // [N]; may be NULL
  std::byte* grad_expert_out;  // [N, H]
  float* grad_recv_weights;    // [N]; may be NULL
};

struct DispatchBwdCall : MovementCall {
  const std::byte* grad_recv;     // [N, H]
  const float* grad_recv_weights; // [N]; may be NULL
  std::byte* grad_tokens;         // [T, H]
  float* grad_topk_weights;       // [T, K]; NULL iff grad_recv_weights is
};

class Stages {
public:
  virtual ~Stages() = default;
  virtual void prepare(const PrepareCall& call) = 0;
  virtual void dispatch(const DispatchCall& call) = 0;
  virtual void combine(const CombineCall& call) = 0;
  virtual void combine_bwd(const CombineBwdCall& call) = 0;
  virtual void dispatch_bwd(const DispatchBwdCall& call) = 0;
};

} // namespace epx
