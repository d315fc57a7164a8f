// SPDX-License-Identifier: Apache-2.0
// Launches a kernel that ends the CUDA context.
#pragma once

#include <cuda_runtime_api.h>

namespace epx::test {

void launch_trap(cudaStream_t stream);

} // namespace epx::test
