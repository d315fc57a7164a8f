// SPDX-License-Identifier: Apache-2.0
#include "runtime/nodes/leg_probe.h"

#include <cuda_runtime_api.h>

#include "base/background_thread.h"
#include "base/cuda_error.h"
#include "base/error.h"

namespace epx::cuda {
namespace {

using namespace std::chrono_literals;

constexpr auto kReadInterval = 50ms;

// The calling thread makes no other use of CUDA. Where the state is freed meanwhile, CUDA refuses the copy, or cudaFree waits
// for it. In relaxed mode the calls break no capture that is under way in another thread.
std::optional<DeviceState> read(const DeviceState* state, int device) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaStream_t stream = nullptr;
  if (cudaSetDevice(device) != cudaSuccess || cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess ||
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
    return std::nullopt;
  DeviceState copy{};
  const bool ok = cudaMemcpyAsync(&copy, state, sizeof(copy), cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
                  cudaStreamSynchronize(stream) == cudaSuccess;
  cudaStreamDestroy(stream);
  return ok ? std::optional(copy) : std::nullopt;
}

} // namespace

LegProbe::LegProbe(const DeviceState* state, std::chrono::milliseconds timeout) : state_(state), timeout_(timeout) {
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
}

bool LegProbe::finds_hanging_leg() {
  const bool has_passed = deadline_ && deadline_->passed(); // asked at every poll, so that a suspension is seen
  if (has_failed_) return false;
  bool hangs = false;
  if (read_.valid()) {
    if (read_.wait_for(0s) != std::future_status::ready) return false;
    const std::optional<DeviceState> state = read_.get();
    has_failed_ = !state;
    if (has_failed_) return false;
    const std::optional<Position> position = position_of(*state);
    hangs = has_passed && position == last_;
    if (!position)
      deadline_.reset();
    else if (!deadline_ || *position != last_)
      deadline_.emplace(timeout_);
    last_ = position.value_or(Position{});
  }
  if (Clock::now() >= next_read_) begin_read();
  return hangs;
}

void LegProbe::begin_read() {
  next_read_ = Clock::now() + kReadInterval;
  try {
    read_ =
        run_in_background("the read of a GPU's state", [state = state_, device = device_] { return read(state, device); });
  } catch (const StatusError&) {
    has_failed_ = true;
  }
}

// Returns none while no leg is running: all blocks that have begun one have left it.
std::optional<LegProbe::Position> LegProbe::position_of(const DeviceState& state) {
  const bool is_beginning = blocks_beginning(state.beginning) != 0; // some of its blocks have begun
  if (!is_beginning && state.seen.blocks_left >= state.begun.blocks) return std::nullopt;
  return Position{state.begun.sequence, state.seen.blocks_left, state.beginning};
}

} // namespace epx::cuda
