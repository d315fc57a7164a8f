// SPDX-License-Identifier: Apache-2.0
// The grouped FFN on a GPU: which kernels run, on which memory. Arguments are checked by whoever calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/cuda/cuda_call.h"
#include "moe/ffn/ffn.h"
#include "moe/ffn/params.h"
#include "moe/gemm/grouped_gemm.h"

namespace epx::moe::cuda {

// Rows have the dtype; weights of rows are fp32.
struct DeviceFfnForward {
  epx_dtype dtype = EPX_DTYPE_UNSET;
  ParamTensors params;
  DeviceZones zones;
  const void* recv_tokens = nullptr;   // [N, H]
  const float* recv_weights = nullptr; // [N] or NULL
  void* expert_out = nullptr;          // [N, H]; NULL: only pre_act is wanted
  void* pre_act = nullptr;             // [N, shape.pre_act()] or NULL
};

struct DeviceFfnBackward {
  epx_dtype dtype = EPX_DTYPE_UNSET;
  ParamTensors params;
  DeviceZones zones;
  const void* recv_tokens = nullptr;
  const float* recv_weights = nullptr;
  const void* pre_act = nullptr;
  const void* grad_expert_out = nullptr;
  void* grad_recv = nullptr;
  float* grad_recv_weights = nullptr; // [N] or NULL
  ParamTensors grads;                 // each fp32 or of the dtype
  bool accumulate = false;            // adds to grads, which are fp32
};

// Enqueue on the call's stream, and take its workspace. Throw when a launch fails.
void ffn_fwd(const FfnShape& shape, const DeviceFfnForward& args, const CudaCall& call);
void ffn_bwd(const FfnShape& shape, const DeviceFfnBackward& args, const CudaCall& call);

} // namespace epx::moe::cuda
