// SPDX-License-Identifier: Apache-2.0
// The one place where a cudaError_t becomes a StatusError.
#pragma once

#include <cuda_runtime_api.h>

#include "base/error.h"

namespace epx {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError(); // clears an error that is not sticky, so that no later call of the caller's finds it
  fail(error == cudaErrorMemoryAllocation ? EPX_ERROR_OUT_OF_MEMORY : EPX_ERROR_SYSTEM, "{}: {} ({})", call,
       cudaGetErrorString(error), cudaGetErrorName(error));
}

} // namespace epx
