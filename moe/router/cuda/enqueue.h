// SPDX-License-Identifier: Apache-2.0
// The router's calls on CUDA. The arguments have been checked, but for the memory that they are in: make_call() checks that, or
// enqueue() itself where there is none, before anything is enqueued.
#pragma once

#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"

namespace epx::moe::cuda {

CudaCall make_call(const epx_moe_router_config& config, const epx_moe_router_args& args);
CudaCall make_call(const epx_moe_router_config& config, const epx_moe_router_bwd_args& args);
void enqueue(const epx_moe_router_config& config, const epx_moe_router_args& args, const CudaCall& call);
void enqueue(const epx_moe_router_config& config, const epx_moe_router_bwd_args& args, const CudaCall& call);
void enqueue(const epx_moe_router_config& config, const epx_moe_aux_loss_args& args);
void enqueue(const epx_moe_bias_update_args& args);

} // namespace epx::moe::cuda
