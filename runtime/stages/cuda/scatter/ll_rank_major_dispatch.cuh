// SPDX-License-Identifier: Apache-2.0
// The kernels of dispatch_rank_major on the low-latency path.
#pragma once

#include <vector>

#include "runtime/stages/cuda/scatter/rank_major_call.cuh"

namespace epx::cuda {

std::vector<const void*> ll_rank_major_kernels();
cudaError_t launch_ll_dispatch_rank_major(const RankMajorParams& params, const Grid& grid, cudaStream_t stream);

} // namespace epx::cuda
