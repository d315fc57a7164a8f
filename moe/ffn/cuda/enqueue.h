// SPDX-License-Identifier: Apache-2.0
// The grouped FFN's calls on CUDA. The arguments have been checked, but for the memory that they are in: make_call() checks it.
#pragma once

#include "moe/cuda/cuda_call.h"
#include "moe/ffn/ffn.h"

namespace epx::moe::cuda {

CudaCall make_call(const FfnShape& shape, const epx_moe_ffn_args& args);
CudaCall make_call(const FfnShape& shape, const epx_moe_ffn_bwd_args& args);

// Without expert_out only pre_act is computed.
void enqueue(const FfnShape& shape, const ParamTensors& params, const epx_moe_ffn_args& args, const CudaCall& call);
void enqueue(const FfnShape& shape, const ParamTensors& params, const ParamTensors& grads, const epx_moe_ffn_bwd_args& args,
             const CudaCall& call);

} // namespace epx::moe::cuda
