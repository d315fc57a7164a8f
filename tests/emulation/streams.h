// SPDX-License-Identifier: Apache-2.0
// CUDA streams on a CPU: each is a thread that runs the enqueued tasks in order.
#pragma once

#include <functional>

#include <cuda_runtime_api.h>

namespace epx::emulation {

// Runs `task` on the stream; NULL is one more stream, which all threads of the process share.
void enqueue(cudaStream_t stream, std::function<void()> task);

// From now on launches and cudaDeviceSynchronize fail in this process.
void end_context();
// Returns the error that launches return.
cudaError_t context_error();

} // namespace epx::emulation
