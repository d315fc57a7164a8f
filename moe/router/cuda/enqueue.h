// SPDX-License-Identifier: Apache-2.0
// The router's calls on CUDA. The arguments have been checked, but for the memory that they are in, which these functions do
// before they enqueue anything.
#pragma once

#include "epx/epx_moe.h"

namespace epx::moe::cuda {

void enqueue(const epx_moe_router_config& config, const epx_moe_router_args& args);
void enqueue(const epx_moe_router_config& config, const epx_moe_router_bwd_args& args);
void enqueue(const epx_moe_router_config& config, const epx_moe_aux_loss_args& args);
void enqueue(const epx_moe_bias_update_args& args);

} // namespace epx::moe::cuda
