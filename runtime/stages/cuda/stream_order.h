// The order of a group's eager calls that come on different streams.
#pragma once

#include <optional>

#include "base/cuda.h"

namespace epx::cuda {

enum class Capture {
  none,
  active,
  of_other_stream, // nothing can be put on this one, the legacy default stream, while a stream that waits for it is captured
};

inline Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaErrorStreamCaptureImplicit) { // the capture is unharmed
    cudaGetLastError();
    return Capture::of_other_stream;
  }
  check_cuda(error, "cudaStreamIsCapturing");
  return status == cudaStreamCaptureStatusNone ? Capture::none : Capture::active;
}

// Calls of one stream cost nothing; the first call on another one makes that stream wait for an event behind the calls before.
// A call that is captured runs when its graph is replayed, which only the caller knows: it is neither waited for nor made to
// wait, and no edge is drawn between a captured stream and another one. No event can be recorded on a stream while it is
// captured. An event behind every call would keep the next kernel of the stream from being launched early, so that is done only
// in groups that have seen a capture.
class StreamOrder {
public:
  // Before an eager call is launched on `stream`. False: it cannot be made to wait now, because of a capture.
  bool wait_for_last(cudaStream_t stream) const {
    if (!last_ || (*last_ == stream && stream != cudaStreamPerThread)) return true;
    if (!is_recorded_) {
      if (capture_of(*last_) != Capture::none) return false;
      check_cuda(cudaEventRecord(event_.get(), *last_), "cudaEventRecord");
    }
    check_cuda(cudaStreamWaitEvent(stream, event_.get(), 0), "cudaStreamWaitEvent");
    return true;
  }

  // After it. Another thread's cudaStreamPerThread is another stream, so an event has to be recorded at once there.
  void launched(cudaStream_t stream) {
    last_ = stream;
    is_recorded_ = has_seen_capture_ || stream == cudaStreamPerThread;
    if (is_recorded_) check_cuda(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }

  // After a captured call, or one that a capture kept from being launched.
  void saw_capture() { has_seen_capture_ = true; }

private:
  CudaEvent event_;
  std::optional<cudaStream_t> last_; // of an eager call
  bool is_recorded_ = false;         // event_, behind the last call
  bool has_seen_capture_ = false;
};

} // namespace epx::cuda
