// The order of a group's eager calls that come on different streams.
#pragma once

#include <optional>

#include "runtime/base/cuda.h"

namespace epx::cuda {

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// Calls of one stream cost nothing; the first call on another one makes that stream wait for an event behind the calls before.
// A call that is captured runs when its graph is replayed, which only the caller knows: it is neither waited for nor made to
// wait, and no edge is drawn between a captured stream and another one.
class StreamOrder {
public:
  // Before an eager call is launched on `stream`.
  void wait_for_last(cudaStream_t stream) const {
    if (!last_ || (*last_ == stream && !is_recorded_)) return;
    if (!is_recorded_) {
      if (is_capturing(*last_)) return; // the event would belong to the capture
      check_cuda(cudaEventRecord(event_.get(), *last_), "cudaEventRecord");
    }
    check_cuda(cudaStreamWaitEvent(stream, event_.get(), 0), "cudaStreamWaitEvent");
  }

  // After it. Another thread's cudaStreamPerThread is another stream, so an event has to be recorded at once there.
  void launched(cudaStream_t stream) {
    last_ = stream;
    is_recorded_ = stream == cudaStreamPerThread;
    if (is_recorded_) check_cuda(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }

private:
  CudaEvent event_;
  std::optional<cudaStream_t> last_; // of an eager call
  bool is_recorded_ = false;         // event_, behind the last call
};

} // namespace epx::cuda
