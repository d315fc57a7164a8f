// SPDX-License-Identifier: Apache-2.0
// The kernel of combine and dispatch_bwd with a row format, to which the launches of both layouts turn.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/cuda/gather/gather_params.h"
#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/stages.h"

namespace epx::cuda {

cudaError_t launch_quantised_gather(const Launcher& launcher, const MovementCall& call, const CallDescriptor& descriptor,
                                    const GatherTensors& tensors);

} // namespace epx::cuda
