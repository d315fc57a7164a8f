// SPDX-License-Identifier: Apache-2.0
// The grouped GEMMs of FLOAT8_E4M3 on GPUs of compute capability 9.0.
#pragma once

#include <vector>

#include "moe/gemm/grouped_gemm.h"

namespace epx::moe::cuda::sm90 {

std::vector<const void*> fp8_gemm_kernels();

// kRowsByWeight and kWeightGradient, with all that GroupedGemm wants of tensor cores.
cudaError_t launch_fp8_gemm(const GroupedGemm& gemm, const LaunchTarget& target);

} // namespace epx::moe::cuda::sm90
