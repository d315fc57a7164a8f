// SPDX-License-Identifier: Apache-2.0
// Captures CUDA graphs from a stream.
#pragma once

#include <functional>

#include <cuda_runtime_api.h>

#include "tests/support/check.h"
#include "tests/support/group_run.h"

namespace epx::test {

inline void check_cuda(cudaError_t error, const char* call) {
  check(error == cudaSuccess, "{}: {}", call, cudaGetErrorString(error));
}

inline cudaStream_t stream_of(const RankContext& context) {
  return static_cast<cudaStream_t>(context.device->stream());
}

// Captures what `enqueue` enqueues on the stream, without running it; launch() enqueues it there.
class Graph {
public:
  Graph(cudaStream_t stream, const std::function<void()>& enqueue) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&exec_, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(exec_); }

  void launch() const { check_cuda(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch"); }

private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
};

} // namespace epx::test
