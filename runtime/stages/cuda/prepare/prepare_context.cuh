// SPDX-License-Identifier: Apache-2.0
// What every step of prepare works on: the kernel's parameters, a block's shared memory, and the context that has both.
#pragma once

#include "base/device/warp.cuh"
#include "runtime/layout/slots.h"
#include "runtime/stages/cuda/bad_indices.cuh"
#include "runtime/stages/cuda/expert_ranks.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/protocol/call_session.cuh"
#include "runtime/stages/stages.h"

namespace epx::cuda {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;

struct PrepareParams {
  DeviceGroup group;
  PrepareCall call;
  HandleLayout layout;
  CallDescriptor descriptor;
  ExpertRanks experts;
};

// How a kernel makes prepare's part of its call.
struct PrepareRole {
  unsigned num_blocks; // the first blocks of the grid, which prepare
  unsigned sent_calls; // how often the grid calls CallSession::sent(); 0: a later kernel of the call does
  // Whether the blocks call trigger_successor() after the routing all-gather. False in the kernels that also move rows, in
  // which warps wait for peers until the grid ends.
  bool triggers_successor;
  // prepare_dispatch: by (source, token, k), as HandleView::ll_slots, the slots on this rank go to the other blocks of the grid
  // as LL packets too; NULL: they do not.
  LlPacket8* slot_packets;
};

// The shared memory of a block: static in prepare's kernel; at the beginning of the dynamic one in those of prepare_dispatch.
struct PrepareShared {
  int32_t tile_slots[kThreads]; // of the tile's routes; -1: masked or dropped
  int32_t tile_ranks[kThreads]; // the ranks that own these slots; -1: none
  // The exclusive prefix sum of the ranks' numbers of tokens, and then their total; only the routing all-gather has it.
  int32_t token_offsets[kMaxDeviceRanks + 1];
  BadIndices bad_indices;
  uint32_t dropped_routes; // in the block that calls deliver_totals(): the routes of this rank that are dropped
};

// The dynamic shared memory (in prepare_dispatch's kernels behind PrepareShared) is
// int32 next[E] | int32 zone[E] | int32 demand[E] | int32 warp_base[kWarps, E] | int32 [kMaxPrepareBlocks] |
// int16 gathered_experts[kMaxGatheredRoutes]. publish_counts() adds up fewer than E + blocks counts in warp_base and the words
// behind it. Shared memory has no room for more experts than an int16 can number.
constexpr size_t dynamic_shared_bytes(int num_experts) {
  return sizeof(int32_t) * (static_cast<size_t>(num_experts) * (3 + kWarps) + kMaxPrepareBlocks) +
         sizeof(int16_t) * kMaxGatheredRoutes;
}

// The context of a block. The functions that take it are inlined, so that it stays in registers; those that are not inlined
// take a few values instead (see CallContext).
struct PrepareContext {
  const DeviceGroup& group;
  const PrepareCall& args;
  const GroupShape& shape;
  const WindowLayout& layout;
  CallSession call;
  const ExpertRanks& experts;
  HandleWriter plan; // the handle memory
  PrepareRole role;
  int32_t usable_slots;

  PrepareShared& shared;
  int32_t* next;             // [E]: the next slot for a route of this block
  int32_t* zone;             // [E]: the first slot of the expert's zone on its rank
  int32_t* demand;           // [E]: the routes of all ranks
  int32_t* warp_base;        // [kWarps, E]: scratch
  int16_t* gathered_experts; // the experts of the routes of all ranks; only the routing all-gather has them

  __device__ PrepareContext(const DeviceGroup& device_group, const PrepareCall& prepare_call,
                            const ExpertRanks& expert_ranks, const HandleLayout& handle_layout, const CallSession& session,
                            const PrepareRole& prepare_role, PrepareShared& prepare_shared, int32_t* arrays)
      : group(device_group), args(prepare_call), shape(group.context.shape), layout(group.context.layout), call(session),
        experts(expert_ranks), plan(args.handle_mem, handle_layout), role(prepare_role),
        usable_slots(static_cast<int32_t>(static_cast<uint32_t>(shape.max_recv_tokens) /
                                          static_cast<uint32_t>(args.alignment) * static_cast<uint32_t>(args.alignment))),
        shared(prepare_shared), next(arrays), zone(next + shape.num_experts), demand(zone + shape.num_experts),
        warp_base(demand + shape.num_experts),
        gathered_experts(reinterpret_cast<int16_t*>(warp_base + kWarps * shape.num_experts + kMaxPrepareBlocks)) {}
};

// Returns the expert of a route of this rank, or -1 when the route is masked or its index is bad.
__device__ __forceinline__ int expert_of_route(const PrepareContext& c, int64_t route) {
  const int64_t index = index_at(c.args, route);
  return index >= 0 && index < c.shape.num_experts ? static_cast<int>(index) : -1;
}

// One thread calls this for a route that has no expert.
__device__ __forceinline__ void count_if_bad(const PrepareContext& c, int64_t route) {
  if (index_at(c.args, route) != -1) count_bad_index(c.shared.bad_indices, static_cast<uint32_t>(route)); // else masked
}

// The number in a peer's descriptor may be anything, and it becomes an index, so it is clamped.
__device__ __forceinline__ int32_t tokens_of(const PrepareContext& c, int rank) {
  return static_cast<int32_t>(min(static_cast<uint32_t>(c.call.descriptors().num_tokens[rank]),
                                  static_cast<uint32_t>(c.shape.max_tokens_per_rank)));
}

__device__ __forceinline__ uint32_t thread_in_grid() {
  return blockIdx.x * kThreads + threadIdx.x;
}
// The threads of the blocks that prepare.
__device__ __forceinline__ uint32_t threads_that_prepare(const PrepareContext& c) {
  return c.role.num_blocks * kThreads;
}
// One thread of each block calls this after its last store to a peer.
__device__ __forceinline__ void sent(const PrepareContext& c) {
  if (c.role.sent_calls != 0) c.call.sent(c.role.sent_calls);
}

struct TokenRange {
  uint32_t begin, end;
};
// Partitions `num_tokens` tokens among the first `num_blocks` blocks, and returns this block's range.
__device__ __forceinline__ TokenRange partition_tokens(int64_t num_tokens, unsigned num_blocks) {
  const auto tokens = static_cast<uint32_t>(num_tokens);
  const uint32_t tokens_per_block = (tokens + num_blocks - 1) / num_blocks;
  const uint32_t begin = min(tokens_per_block * blockIdx.x, tokens);
  return {begin, min(begin + tokens_per_block, tokens)};
}

__device__ __forceinline__ void store_packet(const PrepareContext& c, LlPacket8* place, int32_t value) {
  store_packet_relaxed_sys(place, LlPacket8{value, c.call.epoch()});
}

// One thread waits for the LL packet that `source` stores at `place`. Returns false when the group has failed.
__device__ __forceinline__ bool wait_for_packet(const PrepareContext& c, const LlPacket8* place, int source,
                                                int32_t& value) {
  LlPacket8 packet{};
  const bool ok = c.call.wait_for_packet(place, packet, source);
  value = packet.value;
  return ok;
}

} // namespace epx::cuda
