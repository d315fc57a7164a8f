// SPDX-License-Identifier: Apache-2.0
// The kernels of combine and dispatch_bwd of the rank-major layout, to which launch_combine and launch_dispatch_bwd turn.
// combine_bwd has the same kernel in both layouts.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/stages.h"

namespace epx::cuda {

cudaError_t launch_combine_rank_major(const Launcher& launcher, const CombineCall& call);
cudaError_t launch_dispatch_rank_major_bwd(const Launcher& launcher, const DispatchBwdCall& call);

} // namespace epx::cuda
