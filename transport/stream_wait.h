// SPDX-License-Identifier: Apache-2.0
// Waits on the host for work that itself waits for peers, with a limit.
#pragma once

#include <chrono>
#include <thread>

#include <cuda_runtime_api.h>

#include "base/cuda_error.h"
#include "base/error.h"
#include "base/suspension_aware_deadline.h"
#include "transport/interrupt.h"

namespace epx {

// Waits until the stream has done all its work. Throws TIMEOUT, SYSTEM, ABORTED (interrupt.h).
inline void wait_for_stream(cudaStream_t stream, std::chrono::milliseconds timeout) {
  SuspensionAwareDeadline deadline{timeout};
  for (cudaError_t state = cudaErrorNotReady; state != cudaSuccess; state = cudaStreamQuery(stream)) {
    if (state != cudaErrorNotReady) check_cuda(state, "cudaStreamQuery");
    if (deadline.passed()) fail(EPX_ERROR_TIMEOUT, "not all ranks came within {} ms", timeout.count());
    require_not_interrupted("the wait for the other ranks");
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

} // namespace epx
