// SPDX-License-Identifier: Apache-2.0
// The kernels of the quantisers, for the host code that launches them. Arguments have been checked, and rows and codes are
// aligned to kQuantiseAlignment; each function returns a cudaError_t.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/cuda/launch_target.h"
#include "moe/quantise/dequantise.h"
#include "moe/quantise/rows.h"
#include "moe/quantise/swiglu.h"
#include "moe/quantise/weight_rows.h"
#include "moe/quantise/weights.h"

namespace epx::moe::cuda {

inline constexpr size_t kQuantiseAlignment = 16; // bytes, of vector loads and stores

// Zones of any values are bounded to the rows.
int launch_quantise_rows(const QuantiseRows& call, const LaunchTarget& target);

int launch_quantise_swiglu(const QuantiseSwiglu& call, const LaunchTarget& target);
int launch_quantise_swiglu_bwd(const QuantiseSwigluBwd& call, const LaunchTarget& target);

int launch_quantise_weights(const QuantiseWeights& call, const LaunchTarget& target);
int launch_quantise_weights(const QuantiseWeightRows& call, const LaunchTarget& target);
int launch_transpose_weights(const TransposeWeights& call, const LaunchTarget& target);

// Rows of FLOAT32 or BFLOAT16 are aligned to kQuantiseAlignment.
int launch_dequantise_rows(const DequantiseRows& call, const LaunchTarget& target);

// The kernels that a block with a recipe in FP8 launches, whose wide rows are BFLOAT16.
std::vector<const void*> block_quantise_rows_kernels();
std::vector<const void*> block_quantise_swiglu_kernels();
std::vector<const void*> block_dequantise_rows_kernels();

} // namespace epx::moe::cuda
