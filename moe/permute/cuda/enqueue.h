// SPDX-License-Identifier: Apache-2.0
// The local permutation's calls on CUDA. The arguments have been checked, but for the memory that they are in, which these
// functions do before they enqueue anything, and for their data, which the kernels look at.
#pragma once

#include "epx/epx_moe.h"
#include "moe/permute/permute.h"

namespace epx::moe::cuda {

void enqueue(const epx_moe_row_map_args& args);
void enqueue(const epx_moe_permute_args& args, const RowMap& map);
void enqueue(const epx_moe_permute_bwd_args& args, const RowMap& map);
void enqueue(const epx_moe_unpermute_args& args, const RowMap& map);
void enqueue(const epx_moe_unpermute_bwd_args& args, const RowMap& map);

} // namespace epx::moe::cuda
