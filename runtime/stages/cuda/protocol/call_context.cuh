// SPDX-License-Identifier: Apache-2.0
// The call context: the identity of a call in progress, and the addresses of its control words in the windows.
#pragma once

#include <cstdint>

#include "base/device/memory_order.cuh"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {

__device__ inline int64_t parity_of(uint64_t sequence) {
  return static_cast<int64_t>(sequence & 1);
}

// Functions that are not inlined get a copy (CallSession::context()): an object whose address escapes has to lie in local
// memory, and its user would wait for those loads.
struct CallContext {
  const DeviceGroup& group;
  epx_operation operation;
  uint64_t sequence;

  __device__ Epoch epoch() const { return static_cast<Epoch>(sequence); }
  __device__ int num_ranks() const { return group.context.shape.num_ranks; }
  __device__ int rank() const { return group.context.rank; }
};

__device__ inline Flag* flag_at(const CallContext& call, int owner, const Region& region, int source) {
  return call.group.window().at<Flag>(owner, region.offset) + source;
}

__device__ inline LlCallDescriptor* descriptor_at(const CallContext& call, int owner, int source, uint64_t sequence) {
  const int64_t index = parity_of(sequence) * call.num_ranks() + source;
  return call.group.window().at<LlCallDescriptor>(owner, call.group.context.layout.call_descriptors.offset) + index;
}

// A test hook: waits at random times.
__device__ inline void inject_delay(const CallContext& call) {
  if (!kTestHooks || call.group.hooks.max_delay_ns == 0) return;
  const uint64_t begin = nanoseconds();
  uint64_t random = (begin ^ call.sequence << 20 ^ blockIdx.x << 10 ^ threadIdx.x) * 0x9e3779b97f4a7c15u;
  random ^= random >> 29;
  if (random % 8 != 0) return;
  while (nanoseconds() - begin < random / 8 % call.group.hooks.max_delay_ns) {
  }
}

} // namespace epx::cuda
