// SPDX-License-Identifier: Apache-2.0
// The LegProbe finds out that a leg hangs on a node of one rank. Legs wait for nobody there, so that no kernel finds it; and NCCL,
// in whose transfers the peers wait, does not tell for whom. Kernels do nothing for it: it reads the node's state from the GPU's
// memory, and only once a call takes too long.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include <cuda_runtime_api.h>

#include "base/suspension_aware_deadline.h"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {

class LegProbe {
public:
  // `state` is that of the legs' group, on the current device, `stream` one that no call is on, and `copy` pinned host memory,
  // which a read may still write after the end of the probe while the device is busy.
  LegProbe(const DeviceState* state, cudaStream_t stream, DeviceState* copy, std::chrono::milliseconds timeout);

  // One thread, which has no other use for CUDA, calls this again and again while a call takes too long. Returns true when reads
  // have found the same leg running for the timeout, and no block has left it meanwhile. It does not wait for the device; where
  // that puts the copy behind the kernel (CUDA_DEVICE_MAX_CONNECTIONS=1 can do so), nothing is found.
  bool finds_hanging_leg();
  // The call has gone on.
  void reset() { deadline_.reset(); }

private:
  // How far the legs have come while one is running.
  struct Position {
    uint64_t begun, blocks_left;
    unsigned long long entered;
    bool operator==(const Position&) const = default;
  };
  static std::optional<Position> position_of(const DeviceState& state);
  bool begins_read();

  const DeviceState* state_;
  cudaStream_t stream_;
  DeviceState* copy_;
  std::chrono::milliseconds timeout_;
  int device_ = 0;
  bool is_reading_ = false;
  bool has_failed_ = false; // nothing can be known of the device any more
  Position last_{};
  std::optional<SuspensionAwareDeadline> deadline_; // of the leg at last_, while one is running
};

} // namespace epx::cuda
