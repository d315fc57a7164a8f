// SPDX-License-Identifier: Apache-2.0
// The grouped FFN's calls on CUDA. The arguments have been checked, but for the memory that they are in, which these
// functions do before they enqueue anything.
#pragma once

#include "moe/ffn/ffn.h"

namespace epx::moe::cuda {

void enqueue(const FfnShape& shape, const ParamTensors& params, const epx_moe_ffn_args& args);
void enqueue(const FfnShape& shape, const ParamTensors& params, const ParamTensors& grads,
             const epx_moe_ffn_bwd_args& args);

} // namespace epx::moe::cuda
