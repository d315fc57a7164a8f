// CUDA streams on a CPU: each is a thread that runs what is enqueued, in order.
#pragma once

#include <functional>

#include <cuda_runtime_api.h>

namespace epx::emulation {

// Runs `task` on the stream; NULL is one more stream, of all threads of the process.
void enqueue(cudaStream_t stream, std::function<void()> task);

} // namespace epx::emulation
