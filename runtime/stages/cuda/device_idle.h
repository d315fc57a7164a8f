// SPDX-License-Identifier: Apache-2.0
// Waits until a GPU has no work, with a limit.
#pragma once

#include <chrono>
#include <future>

#include <cuda_runtime_api.h>

#include "base/background_thread.h"
#include "base/suspension_aware_deadline.h"

namespace epx::cuda {

inline constexpr std::chrono::seconds kTimeToAbort{2}; // time for waiting kernels to see that their group has ended

// The streams on which graphs of a group are replayed are not known to it, so this waits for the whole device, in a thread
// that nobody has to join.
inline std::future<cudaError_t> synchronize_in_background(int device) {
  return run_in_background("the wait for the GPU", [device] {
    // The thread does not set device 0 again at its end: since CUDA 12 that would create a context there.
    const cudaError_t error = cudaSetDevice(device);
    return error == cudaSuccess ? cudaDeviceSynchronize() : error;
  });
}

// Returns false at the deadline, and where gives_up() returns true.
inline bool comes_before(
    SuspensionAwareDeadline& deadline, const std::future<cudaError_t>& idle,
    bool (*gives_up)() noexcept = []() noexcept { return false; }) {
  do
    if (idle.wait_for(std::chrono::milliseconds(5)) == std::future_status::ready) return true;
  while (!deadline.passed() && !gives_up());
  return false;
}

} // namespace epx::cuda
