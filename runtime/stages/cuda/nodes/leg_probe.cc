// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/nodes/leg_probe.h"

#include "base/cuda_error.h"

namespace epx::cuda {

LegProbe::LegProbe(const DeviceState* state, cudaStream_t stream, DeviceState* copy, std::chrono::milliseconds timeout)
    : state_(state), stream_(stream), copy_(copy), timeout_(timeout) {
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
}

bool LegProbe::finds_hanging_leg() {
  const bool has_passed = deadline_ && deadline_->passed(); // asked at every poll, so that a suspension is seen
  if (has_failed_) return false;
  bool hangs = false;
  if (is_reading_) {
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error == cudaErrorNotReady) return false;
    is_reading_ = false;
    has_failed_ = error != cudaSuccess;
    if (has_failed_) return false;
    const std::optional<Position> position = position_of(*copy_);
    hangs = has_passed && position == last_;
    if (!position)
      deadline_.reset();
    else if (!deadline_ || *position != last_)
      deadline_.emplace(timeout_);
    last_ = position.value_or(Position{});
  }
  is_reading_ = begins_read();
  has_failed_ = !is_reading_;
  return hangs;
}

bool LegProbe::begins_read() {
  // The thread keeps both settings. To set another device again would make a context there; and without the mode a query would
  // break a capture that is under way in another thread.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  return cudaSetDevice(device_) == cudaSuccess && cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess &&
         cudaMemcpyAsync(copy_, state_, sizeof(*copy_), cudaMemcpyDeviceToHost, stream_) == cudaSuccess;
}

// Returns none while no leg is running: all blocks that have begun one have left it.
std::optional<LegProbe::Position> LegProbe::position_of(const DeviceState& state) {
  const bool is_beginning = static_cast<uint32_t>(state.entered) != 0; // some of its blocks are past the entry barrier
  if (!is_beginning && state.seen.blocks_left >= state.begun.blocks) return std::nullopt;
  return Position{state.begun.sequence, state.seen.blocks_left, state.entered};
}

} // namespace epx::cuda
