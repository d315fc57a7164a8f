// SPDX-License-Identifier: Apache-2.0
// The kernel of prepare. Blocks and ranks exchange LL packets (CallSession::wait_for_packet), which carry their flag with the
// data, so no block needs a fence, and the grid has no barrier: each block waits for exactly the packets that it reads.
//
// Count exchange (count_exchange.cuh): ranks exchange only their counts, and each computes its own slots by a stable counting
// sort.
//   count    Each block counts the routes of its own range of tokens, by expert.
//   publish  Each block takes some experts, adds their counts up over the blocks, stores the sums in the window of every rank,
//            and stores for each block how many routes the blocks before it have.
//   assign   Each block now knows where its routes of each expert begin: the zone, then the ranks before this one, then the
//            blocks before this one. It walks its tokens tile by tile, gives every route its slot, and writes the
//            slot's record (source rank, token, k) in the window of the rank that owns the slot.
//   deliver  All blocks write the handle memory and the outputs from the packets that peers have stored.
//
// Routing all-gather (routing_all_gather.cuh): when the routes of every rank are few enough, ranks exchange those, and each
// computes the slots of all ranks, so that ranks wait for each other once, and blocks not at all.
//   publish  Every block stores some of this rank's routes in the window of every rank.
//   count    Each block counts all routes of all ranks, and those before its own range of the tokens of all ranks.
//   assign   Each rank assigns the slots of all ranks' tokens as above, and keeps only its own slots and routes.
//   deliver  The blocks write the other outputs. The leader CTA has no tokens to assign, so it starts with this.
//
//   warps                             what they do                               what they wait for
//   block 0, all                      post the call descriptor                   nothing
//   all                               count, assign, deliver                     entry barrier; LL packets of counts, routes,
//                                                                                slot records and first slots
//   block 0, one (count exchange)     also adds up and reports bad indices       LL packets of the other blocks
//   the block with the totals, last   also reports totals and events             nothing more
//   (the leader CTA of the all-gather;
//   block 0 of the count exchange)
//
// The kernel executes its code once and waits for instruction fetches, so loops stay rolled, except where unrolling keeps loads
// in flight.
#include "runtime/stages/cuda/kernels.h"

#include "base/device/launch.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/prepare/prepare_steps.cuh"

namespace epx::cuda {
namespace {

__device__ __forceinline__ void prepare(const PrepareParams& params) {
  __shared__ PrepareShared shared;
  const auto operation = static_cast<epx_operation>(params.descriptor.operation);
  // In prepare_dispatch the kernel behind this one sends the rows, and ends the call.
  const PrepareRole role{gridDim.x, operation == EPX_OP_PREPARE ? gridDim.x : 0, true, nullptr};
  const CallSession call(params.group, operation);
  begin_prepare(call, params.descriptor, shared);
  const PrepareContext c(params.group, params.call, params.experts, params.layout, call, role, shared,
                         dynamic_shared_memory<int32_t>());
  if (!c.call.begin()) return;
  if (!publish(c)) return;
  if (!c.call.enter_begun(params.descriptor)) return; // the entry barrier
  prepare_behind_entry(c);
}

// With one block on an SM threads may have 128 registers, and nothing is spilled. On few SMs more blocks with 64 registers are
// faster (docs/tuning.md).
template <int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) prepare_kernel(const __grid_constant__ PrepareParams params) {
  pdl_wait(params);
  prepare(params);
  leave(params.group);
}

} // namespace

const void* prepare_kernel_address(bool shares_sms) {
  return shares_sms ? reinterpret_cast<const void*>(&prepare_kernel<2>) : reinterpret_cast<const void*>(&prepare_kernel<1>);
}
int prepare_threads() {
  return kThreads;
}
size_t prepare_shared_bytes(int num_experts) {
  return dynamic_shared_bytes(num_experts);
}
size_t prepare_scratch_words(int num_experts, int blocks) {
  return static_cast<size_t>(blocks) * (2 * static_cast<size_t>(num_experts) + 2); // block_counts and routes_before
}

cudaError_t launch_prepare(const Launcher& launcher, const PrepareCall& call) {
  return launch_first_half(launcher, call, describe(call));
}

cudaError_t launch_first_half(const Launcher& launcher, const PrepareCall& call, const CallDescriptor& descriptor) {
  const GroupShape& shape = launcher.group.context.shape;
  const PrepareParams params{launcher.group, call, make_handle_layout(shape, call.top_k), descriptor,
                             ExpertRanks(ExpertBlocks{shape.num_experts, shape.num_ranks})};
  const auto [grid, shares_sms] = launcher.plan.next_prepare(call.num_tokens * call.top_k, launcher.stream);
  return launch_cooperative(shares_sms ? &prepare_kernel<2> : &prepare_kernel<1>, grid, launcher.stream, params);
}

} // namespace epx::cuda
