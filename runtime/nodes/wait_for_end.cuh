// SPDX-License-Identifier: Apache-2.0
// How a rank whose call has failed keeps wrong rows from peers that cannot know of the failure: a rail peer, which shares no
// window with the node, or the ranks of this node, to which this rank relays what has come by rail.
#pragma once

#include "base/device/memory_order.cuh"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {

constexpr unsigned kEndBackoffNs = 2'000;       // each poll loads from host memory
constexpr uint64_t kTimeToAbortNs = 50'000'000; // within which transfers are aborted once the host has ended the group

// The kernels of the node's calls that come behind this one do nothing; the host reports why.
__device__ inline void end_calls(const DeviceGroup& group) {
  atomicExch(&group.state->failed, 1u);
}

// One thread, behind a transfer, ends the node's calls if the host has aborted that transfer, which may then have brought
// nothing. The host stores its abort record before it aborts the rails, so the record is visible here.
__device__ inline void end_calls_if_aborted(const DeviceGroup& group) {
  if (load_relaxed_sys(group.host_abort_record) != 0) end_calls(group);
}

// One thread waits until the host has ended the group, on a verdict that the peers get too, so that no transfer behind this
// kernel brings anything. If no verdict comes, as where this rank's own process is stopped, the wait lasts as long as one for a
// peer.
__device__ inline void wait_for_end(const DeviceGroup& group) {
  uint64_t begin = nanoseconds();
  while (load_relaxed_sys(group.host_abort_record) == 0 && nanoseconds() - begin < group.timeout_ns)
    backoff(kEndBackoffNs);
  end_calls(group);
  begin = nanoseconds();
  while (nanoseconds() - begin < kTimeToAbortNs)
    backoff(kEndBackoffNs);
}

} // namespace epx::cuda
