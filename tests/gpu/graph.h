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
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    check_cuda(cudaStreamEndCapture(stream, &captured_), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&exec_, captured_, 0), "cudaGraphInstantiate");
  }
  // Instantiates what `other` has captured once more, for another stream.
  Graph(cudaStream_t stream, const Graph& other) : stream_(stream) {
    check_cuda(cudaGraphInstantiate(&exec_, other.captured_, 0), "cudaGraphInstantiate");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    if (captured_ != nullptr) cudaGraphDestroy(captured_);
  }

  void launch() const { check_cuda(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch"); }

private:
  cudaStream_t stream_;
  cudaGraph_t captured_ = nullptr; // NULL: by another Graph
  cudaGraphExec_t exec_ = nullptr;
};

} // namespace epx::test
