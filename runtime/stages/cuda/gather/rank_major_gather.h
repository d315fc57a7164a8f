// SPDX-License-Identifier: Apache-2.0
// The kernels of combine and dispatch_bwd of the rank-major layout. combine_bwd is that of kernels.h, on another plan.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/stages/cuda/launch_plan.h"
#include "runtime/stages/cuda/protocol/device_group.h"
#include "runtime/stages/stages.h"

namespace epx::cuda {

cudaError_t launch_combine_rank_major(const DeviceGroup& group, LaunchPlan& plan, const CombineCall& call,
                                      cudaStream_t stream);
cudaError_t launch_dispatch_rank_major_bwd(const DeviceGroup& group, LaunchPlan& plan, const DispatchBwdCall& call,
                                           cudaStream_t stream);

} // namespace epx::cuda
