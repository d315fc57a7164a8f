// SPDX-License-Identifier: Apache-2.0
// One call of the node: the ranks deliver the slot records and first slots of a leg's tokens to the owners of the slots. See
// multi_node_prepare.cu.
#pragma once

#include "runtime/nodes/multi_node_prepare_params.h"
#include "runtime/nodes/node_tokens.cuh"
#include "runtime/stages/cuda/prepare/prepare_context.cuh"

namespace epx::cuda {

struct DeliverLegParams {
  DeviceGroup group; // of the legs
  MultiNodePrepareParams prepare;
  HandleLayout plan_layout;  // of the leg
  CallDescriptor descriptor; // without the number of tokens, which only the device knows
  int node, chunk;           // of the leg
  bool is_first;             // this leg's call reports
};

// A leg's call in progress.
struct DeliverLegContext {
  const DeliverLegParams& params;
  CallSession call;
  HandleWriter plan;   // of the leg
  uint32_t num_tokens; // that this rank stands for

  __device__ explicit DeliverLegContext(const DeliverLegParams& leg_params)
      : params(leg_params), call(leg_params.group, static_cast<epx_operation>(leg_params.descriptor.operation)),
        plan(leg_params.prepare.call.handle_mem, leg_params.plan_layout),
        num_tokens(static_cast<uint32_t>(leg_params.prepare.nodes.shape.tokens_in_chunk(
            leg_params.prepare.plan().relay_counts[leg_params.node], leg_params.chunk))) {}

  __device__ const MultiNodeShape& shape() const { return params.prepare.nodes.shape; }
  __device__ const WindowLayout& layout() const { return params.group.context.layout; }
  __device__ uint32_t top_k() const { return static_cast<uint32_t>(params.prepare.call.top_k); }
  __device__ LlSlotRecord* records_at(int owner) const {
    return params.group.window().at<LlSlotRecord>(owner, layout().ll_slot_records.offset);
  }
  // By the source, which is an index in the node, and the number of the token in the leg.
  __device__ LlPacket8* first_slots_at(int owner, int source) const {
    return params.group.window().at<LlPacket8>(owner, layout().first_slots.offset) +
           int64_t{source} * shape().chunk_tokens();
  }
  // The number in a peer's descriptor may be anything, and it becomes an index, so it is clamped.
  __device__ uint32_t tokens_of(int source) const {
    return min(static_cast<uint32_t>(call.descriptors().num_tokens[source]), static_cast<uint32_t>(shape().chunk_tokens()));
  }
  __device__ const Route* routes_of(uint32_t token) const { return plan.routes + int64_t{token} * top_k(); } // [K]
  // Returns the number that a token of the leg has on its home rank.
  __device__ int32_t home_token(uint32_t token) const {
    const int64_t row = int64_t{params.chunk} * shape().chunk_tokens() + token;
    if (params.node == shape().own_node) return static_cast<int32_t>(row);
    return token_of_row(params.prepare.buffers.received_tables + params.node * table_words(shape()),
                        params.prepare.call.top_k, row);
  }
};

// Returns the record of the slot of route k, which has one; `routes` are those of the token [K].
__device__ __forceinline__ SlotRecord record_of_leg_route(const DeliverLegContext& c, const Route* routes, uint32_t token,
                                                          uint32_t k) {
  const int rank = routes[k].rank;
  int32_t next_slot = -1;
  bool is_first = true;
#pragma unroll 1
  for (uint32_t other = c.top_k(); other-- > 0;) {
    if (routes[other].rank != rank) continue;
    if (other > k) next_slot = routes[other].slot;
    if (other < k) is_first = false;
  }
  const int home_rank = c.params.node * c.shape().ranks_per_node() + c.shape().index_in_node();
  return {c.home_token(token),
          next_slot,
          static_cast<uint16_t>(home_rank),
          static_cast<uint8_t>(k),
          static_cast<uint8_t>(is_first ? 1 : 0),
          static_cast<uint8_t>(routes[k].rank_ordinal & 0x7f)};
}

// Stores LL packets in the windows of the node, this rank's included: the record of each slot on its rank, and each token's
// first slot, or -1, on every rank.
__device__ __forceinline__ void send_leg(const DeliverLegContext& c) {
#pragma unroll 1
  for (uint32_t i = thread_in_grid(); i < c.num_tokens * c.top_k(); i += gridDim.x * kThreads) {
    const uint32_t token = i / c.top_k();
    const Route* const routes = c.routes_of(token);
    const uint32_t k = i - token * c.top_k();
    if (routes[k].slot < 0) continue;
    store_packet_relaxed_sys(c.records_at(routes[k].rank) + routes[k].slot,
                             LlSlotRecord{record_of_leg_route(c, routes, token, k), c.call.epoch()});
  }
#pragma unroll 1
  for (uint32_t i = thread_in_grid(); i < c.num_tokens * static_cast<uint32_t>(c.call.num_ranks());
       i += gridDim.x * kThreads) {
    const uint32_t owner = i / c.num_tokens; // neighbouring threads' stores coalesce
    const uint32_t token = i - owner * c.num_tokens;
    const Route* const routes = c.routes_of(token);
    int32_t first_slot = -1;
#pragma unroll 1
    for (uint32_t k = c.top_k(); k-- > 0;)
      if (routes[k].rank == static_cast<int>(owner)) first_slot = routes[k].slot;
    store_packet_relaxed_sys(c.first_slots_at(static_cast<int>(owner), c.call.rank()) + token,
                             LlPacket8{first_slot, c.call.epoch()});
  }
  __syncthreads();
  if (threadIdx.x == kThreads - 1) c.call.sent(gridDim.x);
}

// One thread writes the records of a token's slots on this rank, which are a chain. The walk ends after K steps, and at any
// number that is no slot, whatever the window has.
__device__ __forceinline__ bool receive_chain(const DeliverLegContext& c, int source, int32_t first_slot) {
  const PrepareCall& args = c.params.prepare.call;
  const auto num_slots = static_cast<uint32_t>(c.shape().group.max_recv_tokens);
  int32_t slot = first_slot;
#pragma unroll 1
  for (uint32_t step = 0; step < c.top_k() && static_cast<uint32_t>(slot) < num_slots; ++step) {
    LlSlotRecord packet{};
    if (!c.call.wait_for_packet(c.records_at(c.call.rank()) + slot, packet, source)) return false;
    c.plan.slot_records[slot] = packet.record;
    if (args.slot_origin != nullptr) {
      int32_t* const origin = args.slot_origin + 3 * int64_t{slot};
      origin[0] = packet.record.source;
      origin[1] = packet.record.token;
      origin[2] = packet.record.k;
    }
    slot = packet.record.next_slot;
  }
  return true;
}

// Writes the first slots of all tokens of the leg, -1 beyond those of a source, and the records of their slots.
__device__ __forceinline__ void receive_leg(const DeliverLegContext& c) {
  const auto chunk_tokens = static_cast<uint32_t>(c.shape().chunk_tokens());
#pragma unroll 1
  for (uint32_t i = thread_in_grid(); i < static_cast<uint32_t>(c.call.num_ranks()) * chunk_tokens;
       i += gridDim.x * kThreads) {
    const int source = static_cast<int>(i / chunk_tokens);
    LlPacket8 packet{-1, 0};
    if (i % chunk_tokens < c.tokens_of(source) &&
        !c.call.wait_for_packet(c.first_slots_at(c.call.rank(), 0) + i, packet, source))
      return;
    c.plan.first_slots[i] = packet.value;
    if (!receive_chain(c, source, packet.value)) return;
  }
}

// One thread reports what this rank has counted.
__device__ __noinline__ inline void report_prepare(const CallContext& context, const MultiNodePrepareParams& params,
                                                   epx_overflow overflow) {
  const MultiNodePrepareTotals totals = *params.buffers.totals;
  if (totals.bad_indices != 0) {
    const auto first = static_cast<int64_t>(~totals.first_bad_inverted);
    const auto number = static_cast<int64_t>(totals.bad_indices);
    record_event(context, EPX_EVENT_BAD_INDEX, number, number, index_at(params.call, first), first / params.call.top_k,
                 first % params.call.top_k);
  }
  const int64_t dropped = totals.demand - totals.kept;
  if (overflow == EPX_OVERFLOW_ERROR && dropped > 0)
    record_event(context, EPX_EVENT_OVERFLOW, dropped, totals.demand, dropped, totals.rows_needed, params.call.zone_stride);
}

__device__ __forceinline__ void deliver_leg(const DeliverLegParams& params) {
  __shared__ CallDescriptor descriptor;
  const DeliverLegContext c(params);
  if (threadIdx.x == 0) {
    descriptor = params.descriptor;
    descriptor.num_tokens = c.num_tokens;
  }
  __syncthreads();
  if (blockIdx.x == 0) c.call.post(descriptor, params.prepare.nodes.state->sequence); // which is the id of the new plan
  if (!c.call.enter(descriptor)) return; // the entry barrier: the packets of the leg before have been read
  if (params.is_first && blockIdx.x == 0 && threadIdx.x == kThreads - 1)
    report_prepare(c.call.context(), params.prepare, params.group.context.overflow);
  send_leg(c);
  receive_leg(c);
}

} // namespace epx::cuda
