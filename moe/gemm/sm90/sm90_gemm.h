// SPDX-License-Identifier: Apache-2.0
// The grouped GEMMs on GPUs of compute capability 9.0: for BFLOAT16 by CUTLASS, for FLOAT8_E4M3 by fp8_gemm.h.
#pragma once

#include <vector>

#include "moe/gemm/grouped_gemm.h"

namespace epx::moe::cuda::sm90 {

std::vector<const void*> gemm_kernels(epx_dtype in_dtype);

// Needs gemm.tensor_core_workspace. Throws when CUTLASS needs more of it than there is.
cudaError_t launch_gemm(const GroupedGemm& gemm, const LaunchTarget& target);

} // namespace epx::moe::cuda::sm90
