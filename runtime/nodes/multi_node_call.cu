// SPDX-License-Identifier: Apache-2.0
// How a call of a group of several nodes begins and ends on the device, and how its legs get their headers. Each kernel has one
// block, which waits for no peer.
//
//   kernel          what its threads do
//   begin_call      one counts the call and publishes that it has begun
//   end_call        one publishes that the call has ended
//   post_records    thread 0 checks the header of the handle memory and publishes T; then each writes the record for one node
//                   at a time
//   open_legs       each writes the header of one leg at a time; thread 0 reports a rail peer that has another plan, or makes
//                   another call, in which case no leg follows: it waits until the host has ended the group
//   hold_rows       one does the same where a leg has failed
//   check_transfer  one ends the call where the host has aborted the transfer before
#include "base/device/launch.h"
#include "base/device/memory_order.cuh"
#include "base/device/warp.cuh"
#include "runtime/nodes/disagreement.cuh"
#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/nodes/rail_records.h"
#include "runtime/nodes/wait_for_end.cuh"
#include "runtime/stages/cuda/protocol/events.cuh"
#include "runtime/stages/cuda/protocol/failure.cuh"

namespace epx::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void begin_call_kernel(const __grid_constant__ MultiNodeDevice nodes, epx_operation operation) {
  if (threadIdx.x != 0) return;
  const uint64_t sequence = ++nodes.state->sequence;
  nodes.progress->operations[sequence % MultiNodeProgress::kCalls] = operation;
  // A leg that failed at its entry barrier has not advanced begun.sequence, so begun.sequence + 1 is its number, and it belongs
  // to the call before. The legs of this call end at once, so ~0 keeps reports from naming this call (MultiNodeWatch::call_of_leg).
  nodes.progress->first_leg[sequence % MultiNodeProgress::kCalls] =
      nodes.node_state->failed != 0 ? ~uint64_t{0} : nodes.node_state->begun.sequence + 1;
  // st.release: a host that has acquired `begun` sees the two stores above.
  store_release_sys(&nodes.progress->begun, sequence);
}

__global__ void end_call_kernel(const __grid_constant__ MultiNodeDevice nodes) {
  if (threadIdx.x == 0) store_release_sys(&nodes.progress->ended, nodes.state->sequence);
}

struct CallParams {
  MultiNodeCall nodes;
  MovementCall call;
};

// Returns whether the header fits this call: it checks what Movement checks, and that the counts fit the group, because
// write_record uses them as indices.
__device__ bool is_usable(const CallParams& params, const HandleHeader& header) {
  const MovementCall& call = params.call;
  const MultiNodeShape& shape = params.nodes.shape;
  return header.magic == kHandleMagic && header.checksum == header_checksum(header) &&
         header.group_id == params.nodes.group_id && header.rank == shape.rank && header.top_k == call.top_k &&
         header.alignment == call.alignment && header.num_tokens == call.num_tokens &&
         header.rows_per_source == call.rows_per_source && counts_fit(header, shape.group, 0);
}

// Writes the record for a node. Handle memory is not trusted; what does not fit is made to fit by those who read the record.
__device__ void write_record(const CallParams& params, const MultiNodeHandleReader& plan, const AgreedFields& agreed,
                             int node, int32_t* record) {
  const MultiNodeShape& shape = params.nodes.shape;
  const HandleHeader& header = params.nodes.state->header;
  const bool is_usable = header.magic == kHandleMagic;
  const uint64_t plan_id = is_usable ? header.plan_id : 0;
  const int64_t own_tokens = is_usable ? header.num_tokens : 0;
  const int64_t tokens =
      node == shape.own_node ? own_tokens : max(int64_t{0}, min(int64_t{plan.sent_counts[node]}, own_tokens));
  record[0] = static_cast<int32_t>(plan_id);
  record[1] = static_cast<int32_t>(plan_id >> 32);
  record[2] = static_cast<int32_t>(tokens);
  store_agreed_fields(record + kRecordAgreedWord, agreed);
  for (int chunk = 0; chunk < shape.num_chunks(); ++chunk) {
    const int64_t end = min((int64_t{chunk} + 1) * shape.chunk_tokens(), tokens);
    // In precision node one row comes home of each token, and the table is not used.
    record[kRecordHeaderWords + chunk] =
        shape.group.sums_by_node() ? static_cast<int32_t>(end) : plan.home_back_rows(node)[end];
  }
}

__global__ void __launch_bounds__(kThreads)
    post_records_kernel(const __grid_constant__ CallParams params, const __grid_constant__ AgreedFields agreed) {
  const MultiNodeDevice& nodes = params.nodes;
  if (threadIdx.x == 0) {
    HandleHeader header = *reinterpret_cast<const HandleHeader*>(params.call.checked_header);
    if (!is_usable(params, header)) header.magic = 0;
    nodes.state->header = header;
    nodes.progress->tokens[nodes.state->sequence % MultiNodeProgress::kCalls] = params.call.num_tokens;
  }
  __syncthreads();
  const MultiNodeHandleReader plan(params.call.handle_mem, params.nodes.layout, nodes.shape);
  for (int node = static_cast<int>(threadIdx.x); node < nodes.shape.num_nodes(); node += kThreads) {
    write_record(params, plan, agreed, node, nodes.sent_records + node * record_words(nodes.shape));
    if (node == nodes.shape.own_node) // which no rail brings
      write_record(params, plan, agreed, node, nodes.received_records + node * record_words(nodes.shape));
  }
}

// The number that the leg of the own node's first chunk will have, in which this rank's events are: in a gather the legs of the
// other nodes come before it.
__device__ uint64_t first_own_leg(const DeviceGroup& group, const MultiNodeShape& shape, epx_operation operation) {
  const bool is_gather = operation == EPX_OP_COMBINE || operation == EPX_OP_DISPATCH_BWD;
  return group.state->begun.sequence + 1 + (is_gather ? (shape.num_nodes() - 1) * shape.num_chunks() : 0);
}

// Reports the first rail peer that takes part with another plan than this rank, as the ranks of its own node do. A rail peer
// that takes part without routes reports that itself.
__device__ void report_mismatch(const DeviceGroup& group, const CallParams& params, const RailRecords& records) {
  const MultiNodeShape& shape = params.nodes.shape;
  const HandleHeader& header = params.nodes.state->header;
  if (header.magic != kHandleMagic) return; // leg(own_node, 0) reports this rank's handle memory
  for (int node = 0; node < shape.num_nodes(); ++node) {
    const uint64_t plan_id = records.plan_id(node);
    if (plan_id == 0 || records.is_active(node)) continue;
    const int peer = node * shape.ranks_per_node() + shape.index_in_node();
    const CallContext leg{group, params.call.operation, first_own_leg(group, shape, params.call.operation)};
    record_event(leg, EPX_EVENT_HANDLE_MISMATCH, 1, 1, 0, 0, peer, static_cast<int64_t>(plan_id), &header);
    break;
  }
}

// Returns whether all rail peers pass what this rank passes; reports the first one that does not.
__device__ bool agrees_with_rail_peers(const MultiNodeDevice& nodes, const RailRecords& records) {
  const MultiNodeShape& shape = nodes.shape;
  const AgreedFields own = records.agreed(shape.own_node);
  for (int node = 0; node < shape.num_nodes(); ++node) {
    if (records.agreed(node) == own) continue;
    publish_disagreement(nodes, {shape.rank, own},
                         {node * shape.ranks_per_node() + shape.index_in_node(), records.agreed(node)});
    return false;
  }
  return true;
}

__global__ void __launch_bounds__(kThreads)
    open_legs_kernel(const __grid_constant__ DeviceGroup group, const __grid_constant__ CallParams params,
                     bool has_fixed_sizes) {
  const MultiNodeDevice& nodes = params.nodes;
  const MultiNodeShape& shape = nodes.shape;
  const RailRecords records(shape, nodes.received_records);
  for (int leg = static_cast<int>(threadIdx.x); leg < shape.num_legs(); leg += kThreads) {
    const int node = leg / shape.num_chunks();
    HandleHeader header = nodes.state->header;
    header.num_tokens = records.leg_tokens(node, leg % shape.num_chunks(), has_fixed_sizes);
    if (leg != shape.leg(shape.own_node, 0)) header.rows_in_use = 0; // so that too few rows are reported once
    if (node != shape.own_node && !records.is_active(node)) header.plan_id |= kSendsNoRows;
    header.rank = shape.index_in_node();
    header.ll_tokens = 0;
    header.checksum = header_checksum(header);
    nodes.leg_headers[leg] = header;
  }
  if (threadIdx.x != 0) return;
  report_mismatch(group, params, records);
  if (agrees_with_rail_peers(nodes, records))
    end_calls_if_aborted(group);
  else
    wait_for_end(group);
}

__global__ void hold_rows_kernel(const __grid_constant__ DeviceGroup group) {
  if (threadIdx.x != 0) return;
  const CallContext last_leg{group, EPX_OP_NONE, group.state->begun.sequence};
  if (may_have_ended(last_leg)) wait_for_end(group);
}

__global__ void check_transfer_kernel(const __grid_constant__ DeviceGroup group) {
  if (threadIdx.x == 0) end_calls_if_aborted(group);
}

} // namespace

std::vector<const void*> multi_node_call_kernels() {
  return {reinterpret_cast<const void*>(&begin_call_kernel),   reinterpret_cast<const void*>(&end_call_kernel),
          reinterpret_cast<const void*>(&post_records_kernel), reinterpret_cast<const void*>(&open_legs_kernel),
          reinterpret_cast<const void*>(&hold_rows_kernel),    reinterpret_cast<const void*>(&check_transfer_kernel)};
}

cudaError_t launch_begin_call(const MultiNodeDevice& nodes, epx_operation operation, cudaStream_t stream) {
  return launch(&begin_call_kernel, {1, kWarp}, stream, nodes, operation);
}

cudaError_t launch_end_call(const MultiNodeDevice& nodes, cudaStream_t stream) {
  return launch(&end_call_kernel, {1, kWarp}, stream, nodes);
}

cudaError_t launch_post_records(const MultiNodeCall& nodes, const MovementCall& call, const AgreedFields& agreed,
                                cudaStream_t stream) {
  return launch(&post_records_kernel, {1, kThreads}, stream, CallParams{nodes, call}, agreed);
}

cudaError_t launch_open_legs(const DeviceGroup& group, const MultiNodeCall& nodes, const MovementCall& call,
                             bool has_fixed_sizes, cudaStream_t stream) {
  return launch(&open_legs_kernel, {1, kThreads}, stream, group, CallParams{nodes, call}, has_fixed_sizes);
}

cudaError_t launch_hold_rows(const DeviceGroup& group, cudaStream_t stream) {
  return launch(&hold_rows_kernel, {1, kWarp}, stream, group);
}

cudaError_t launch_check_transfer(const DeviceGroup& group, cudaStream_t stream) {
  return launch(&check_transfer_kernel, {1, kWarp}, stream, group);
}

} // namespace epx::cuda
