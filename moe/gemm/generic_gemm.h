// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM for every dtype, shape and alignment.
#pragma once

#include <vector>

#include "moe/gemm/grouped_gemm.h"

namespace epx::moe::cuda {

std::vector<const void*> generic_gemm_kernels(epx_dtype in_dtype);

// Elements are summed over the inner index, ascending, in one fp32 accumulator by fma.
cudaError_t launch_generic_gemm(const GroupedGemm& gemm, const LaunchTarget& target);

} // namespace epx::moe::cuda
