// SPDX-License-Identifier: Apache-2.0
// How a rank whose call has failed keeps wrong rows from peers that cannot know of the failure: a rail peer, which shares no
// window with the node, or the ranks of this node, to which this rank relays what it disagrees on with a rail peer.
#pragma once

#include "base/device/memory_order.cuh"
#include "runtime/stages/cuda/nodes/nodes_kernels.h"

namespace epx::cuda {

constexpr unsigned kEndBackoffNs = 2'000; // each poll loads from host memory

// One thread waits until the host has ended the group and its rails, on a verdict that the peers get too, so that no transfer
// behind this kernel brings anything. If no verdict comes, as where rank 0 has died, the wait lasts as long as one for a peer.
__device__ inline void wait_for_end(const NodesDevice& nodes, const DeviceGroup& group) {
  const uint64_t begin = nanoseconds();
  while (load_relaxed_sys(&nodes.progress->rails_have_ended) == 0 && nanoseconds() - begin < group.timeout_ns)
    backoff(kEndBackoffNs);
}

} // namespace epx::cuda
