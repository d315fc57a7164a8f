// SPDX-License-Identifier: Apache-2.0
// A plan that several blocks of a grid make, and other warps of the same grid read before the grid ends: each block signals
// that its part is complete, and may tell the others how many rows its part has for each rank. All blocks of a grid are resident
// at the same time, so a warp may wait for a block.
#pragma once

#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/protocol/call_session.cuh"

namespace epx::cuda {

// DeviceGroup::plan_packets begins with the flags of the blocks, by their index in the grid.
__device__ inline Epoch* plan_part_flag(const DeviceGroup& group, int block) {
  return &group.plan_packets[block].epoch;
}

// Behind the flags: what a block tells about a rank.
__device__ inline LlPacket16* plan_part_packet(const DeviceGroup& group, int block, int rank) {
  return reinterpret_cast<LlPacket16*>(group.plan_packets + kMaxPlanBlocks) + block * group.context.shape.num_ranks + rank;
}
static_assert(kMaxPlanBlocks % 2 == 0, "LlPacket16 is aligned");

// All threads of a block call this: its part of the plan is stored. A release at the scope of the GPU would do.
__device__ inline void signal_plan_part(const DeviceGroup& group, const CallSession& call) {
  __syncthreads();
  if (threadIdx.x == 0) call.signal(plan_part_flag(group, static_cast<int>(blockIdx.x)));
}

// A warp waits for the parts of the blocks [first, end). Returns false, the same in all lanes, when the group has failed.
__device__ inline bool wait_for_plan_parts(const DeviceGroup& group, const CallSession& call, int first, int end) {
  bool ok = true;
#pragma unroll 1
  for (int block = first + lane(); block < end && ok; block += kWarp)
    ok = call.wait_ready(plan_part_flag(group, block), call.rank());
  const bool all = __all_sync(~0u, ok ? 1 : 0) != 0;
  __syncwarp(); // all lanes see what each has acquired: a vote orders no memory
  return all;
}

} // namespace epx::cuda
