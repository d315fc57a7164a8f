// SPDX-License-Identifier: Apache-2.0
// The grouped FFN's calls on CUDA. The arguments have been checked, but for the memory that they are in: make_call() checks it.
#pragma once

#include "moe/cuda/cuda_call.h"
#include "moe/ffn/ffn.h"
#include "moe/ffn/fp8/fp8_ffn.h"

namespace epx::moe::cuda {

CudaCall make_call(const FfnShape& shape, const epx_moe_ffn_args& args);
CudaCall make_call(const FfnShape& shape, const epx_moe_ffn_bwd_args& args);

// Without expert_out only pre_act is computed.
void enqueue(const FfnShape& shape, const ParamTensors& params, const epx_moe_ffn_args& args, const CudaCall& call);
void enqueue(const FfnShape& shape, const ParamTensors& params, const ParamTensors& grads, const epx_moe_ffn_bwd_args& args,
             const CudaCall& call);

// In FP8. `params_name` is what messages call args.params. Zones that have rows begin at multiples of zone_alignment.
CudaCall make_call(const epx_moe_ffn_fp8_args& args, const char* params_name, size_t workspace_bytes);
CudaCall make_call(const epx_moe_ffn_fp8_bwd_args& args, const char* params_name, size_t workspace_bytes);
void enqueue(const FfnShape& shape, const Fp8Forward& forward, const RowZones& zones, int64_t zone_alignment,
             const CudaCall& call);
void enqueue(const FfnShape& shape, const Fp8Backward& backward, const RowZones& zones, int64_t zone_alignment,
             const CudaCall& call);

} // namespace epx::moe::cuda
