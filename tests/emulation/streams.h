// CUDA streams on a CPU: each is a thread that runs what is enqueued, in order.
#pragma once

#include <functional>

#include <cuda_runtime_api.h>

namespace epx::emulation {

// Runs `task` on the stream; NULL is one more stream, of all threads of the process.
void enqueue(cudaStream_t stream, std::function<void()> task);

// From now on launches and cudaDeviceSynchronize fail in this process.
void end_context();
// What a launch returns.
cudaError_t context_error();

} // namespace epx::emulation
