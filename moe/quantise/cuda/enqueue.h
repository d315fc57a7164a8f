// SPDX-License-Identifier: Apache-2.0
// The quantisers' calls on CUDA. The arguments have been checked, but for the memory that they are in, which these functions do
// before they enqueue anything, and for their data, which the kernels look at.
#pragma once

#include <initializer_list>
#include <vector>

#include "epx/epx_moe.h"
#include "moe/quantise/arguments.h"
#include "moe/quantise/rows.h"
#include "moe/quantise/swiglu.h"

namespace epx::moe::cuda {

void enqueue(const epx_moe_quantise_rows_args& args, const QuantiseRows& quantise);
void enqueue(const epx_moe_quantise_swiglu_args& args, const QuantiseSwiglu& quantise);
// Leaves tile_sums to the workspace.
void enqueue(const epx_moe_quantise_swiglu_bwd_args& args, QuantiseSwigluBwd quantise);
void enqueue(const epx_moe_cuda& cuda, std::initializer_list<CheckedWeights> all);
void enqueue(const epx_moe_cuda& cuda, const std::vector<CheckedTranspose>& all);

} // namespace epx::moe::cuda
