// SPDX-License-Identifier: Apache-2.0
// The one place where a cudaError_t becomes a StatusError.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include "base/error.h"

namespace epx {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError(); // clears an error that is not sticky, so that no later call of the caller's finds it
  fail(error == cudaErrorMemoryAllocation ? EPX_ERROR_OUT_OF_MEMORY : EPX_ERROR_SYSTEM, "{}: {} ({})", call,
       cudaGetErrorString(error), cudaGetErrorName(error));
}

// The kernels are compiled for GPUs from this compute capability on (kernel_flags in meson.build); 10 * major + minor.
inline constexpr int kMinComputeCapability = 90;

// Returns what is wrong with a GPU of that compute capability; "" when the kernels run there.
inline std::string why_too_old(int compute_capability) {
  if (compute_capability >= kMinComputeCapability) return "";
  return fmt::format("has compute capability {}.{}; the kernels need {}.{} or later", compute_capability / 10,
                     compute_capability % 10, kMinComputeCapability / 10, kMinComputeCapability % 10);
}

} // namespace epx
