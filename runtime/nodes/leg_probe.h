// SPDX-License-Identifier: Apache-2.0
// The LegProbe finds out that a leg hangs on a node of one rank. Legs wait for nobody there, so that no kernel finds it; and
// NCCL, in whose transfers the peers wait, does not tell for whom. Kernels do nothing for it: it reads the node's state from
// the GPU's memory, and only once a call takes too long.
#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <optional>

#include "base/suspension_aware_deadline.h"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {

class LegProbe {
public:
  // `state` is that of the legs' group, on the current device.
  LegProbe(const DeviceState* state, std::chrono::milliseconds timeout);

  // One thread calls this again and again while a call takes too long. Returns true when reads have found the same leg running
  // for the timeout, and no block has left it meanwhile. Threads of their own make the reads, since a call of CUDA may wait:
  // for another thread that has the driver's lock, or for the kernel (with CUDA_DEVICE_MAX_CONNECTIONS=1). Then nothing is
  // found.
  bool finds_hanging_leg();
  // The call has gone on.
  void reset() { deadline_.reset(); }

private:
  using Clock = std::chrono::steady_clock;
  // How far the legs have come while one is running.
  struct Position {
    uint64_t begun, blocks_left;
    unsigned long long beginning;
    bool operator==(const Position&) const = default;
  };
  static std::optional<Position> position_of(const DeviceState& state);
  void begin_read();

  const DeviceState* state_;
  std::chrono::milliseconds timeout_;
  int device_ = 0;
  std::future<std::optional<DeviceState>> read_; // under way, if it is valid
  Clock::time_point next_read_{};
  bool has_failed_ = false; // nothing can be known of the device any more
  Position last_{};
  std::optional<SuspensionAwareDeadline> deadline_; // of the leg at last_, while one is running
};

} // namespace epx::cuda
