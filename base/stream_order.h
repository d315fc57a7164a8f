// SPDX-License-Identifier: Apache-2.0
// Orders the eager calls that use the same memory, of a group or of an arena, and are made on different streams.
#pragma once

#include <optional>
#include <string_view>

#include "base/cuda.h"
#include "base/error.h"

namespace epx::cuda {

enum class Capture {
  none,
  active,
  of_other_stream, // the legacy default stream takes no work while a stream that waits for it is being captured
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

// Calls on one stream cost nothing; the first call on another stream makes that stream wait for an event behind the calls
// before.
// A captured call runs when its graph is replayed, which only the caller knows: it neither waits nor is waited for, and no edge
// is drawn between a captured stream and another one. No event can be recorded on a stream while it is captured. An event
// behind every call would keep the next kernel of the stream from programmatic dependent launch, so only an order
// that has seen a capture records one.
class StreamOrder {
public:
  // The caller calls this before it launches an eager call on `stream`. Returns false when a capture keeps the stream from
  // waiting.
  bool wait_for_last(cudaStream_t stream) const {
    if (!last_ || (*last_ == stream && stream != cudaStreamPerThread)) return true;
    if (!is_recorded_) {
      if (capture_of(*last_) != Capture::none) return false;
      check_cuda(cudaEventRecord(event_.get(), *last_), "cudaEventRecord");
    }
    check_cuda(cudaStreamWaitEvent(stream, event_.get(), 0), "cudaStreamWaitEvent");
    return true;
  }

  // The caller calls this after the launch. Another thread's cudaStreamPerThread is another stream, so on that stream the event
  // has to be recorded at once.
  void launched(cudaStream_t stream) {
    last_ = stream;
    is_recorded_ = has_seen_capture_ || stream == cudaStreamPerThread;
    if (is_recorded_) check_cuda(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }

  // The caller calls this for a captured call.
  void saw_capture() { has_seen_capture_ = true; }

  // The caller calls this when a capture keeps a call from being launched: throws a refusal. `owner` is whose calls these are,
  // in the genitive.
  [[noreturn]] void refuse_beside_capture(std::string_view call, std::string_view owner, Capture capture) {
    saw_capture();
    if (capture == Capture::of_other_stream)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "{}: the legacy default stream takes no work while a stream that waits for it is being captured: give the call "
           "another stream, or make it when the capture has ended",
           call);
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "{}: the stream of {} last call cannot be waited for while a graph is being captured: make the call when the "
         "capture "
         "has ended",
         call, owner);
  }

private:
  CudaEvent event_;
  std::optional<cudaStream_t> last_; // the stream of the last eager call
  bool is_recorded_ = false;         // event_ is recorded behind the last eager call
  bool has_seen_capture_ = false;
};

} // namespace epx::cuda
