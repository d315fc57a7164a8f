// SPDX-License-Identifier: Apache-2.0
// prepare_dispatch of a rank with many tokens, on the high-throughput path: scatter's warps, whose senders do not wait for the
// plan. Staging is keyed by (source, token), so rows leave before their slots are known. Receivers copy them even where their
// rows could be written in place; the source's descriptor says so (stages_rows).
//
//   blocks, warps      do                                                     wait for
//   the first blocks,  prepare, as in prepare.cu; then receive                as in prepare.cu
//   all
//   send               store a token's row once to each rank that a valid     the entry barrier; a free cell of the signal
//                      expert of the token lives on                           warp
//   signal             as in scatter.cu                                       the entry barrier; the CTA's pending flags
//   receive            as in scatter.cu                                       the whole plan; then what the path of the
//                                                                             token's source makes a receiver wait for
//
// Senders have SMs of their own, where no block prepares: roles are assigned from the first block on that does not prepare
// (block_of_roles). No warp joins another role in the end.
#include "runtime/stages/cuda/kernels.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/prepare_dispatch/prepare_dispatch.cuh"

namespace epx::cuda {
namespace {

// Returns the number of the block among those that have warp roles.
__device__ __forceinline__ int block_of_roles(const PrepareDispatchParams<PlainRows>& params) {
  const unsigned prepare = params.blocks.prepare;
  return static_cast<int>(blockIdx.x >= prepare ? blockIdx.x - prepare : blockIdx.x + gridDim.x - prepare);
}

// Returns how often the grid calls CallSession::sent(): each block that prepares does once, and each signal warp.
__device__ __forceinline__ unsigned num_senders(const PrepareDispatchParams<PlainRows>& params) {
  return params.blocks.prepare + static_cast<unsigned>(params.role_counts.sender_blocks * params.role_counts.signal_warps);
}

// Returns false, the same in all threads of the block, when the group has failed.
__device__ __forceinline__ bool prepare(const PrepareDispatchParams<PlainRows>& params, const CallSession& call) {
  PrepareShared& shared = *dynamic_shared_memory<PrepareShared>();
  begin_prepare(call, params.descriptor, shared);
  const PrepareRole role{params.blocks.prepare, num_senders(params), false, nullptr};
  const PrepareContext c(params.group, params.prepare, params.experts, params.layout, call, role, shared,
                         reinterpret_cast<int32_t*>(&shared + 1));
  if (!call.begin()) return false;
  if (!publish(c)) return false;
  if (!call.enter_begun(params.descriptor)) return false; // the entry barrier
  const PreparedPart part = prepare_behind_entry(c);
  if (__syncthreads_and(part.ok ? 1 : 0) == 0) return false;
  signal_plan_part(params.group, call);
  if (part.has_totals && threadIdx.x == 0) report_events(call.context(), params, call.descriptors(), true);
  return true;
}

__device__ __forceinline__ void prepare_dispatch(const PrepareDispatchParams<PlainRows>& params) {
  const CallSession call(params.group, EPX_OP_PREPARE_DISPATCH);
  if (!(blockIdx.x < params.blocks.prepare ? prepare(params, call) : call.enter(params.descriptor))) return;
  TmaRowPipeline pipeline = pipeline_of_warp();
  const WarpAssignment warp = assign_warp_role(params.role_counts, call.num_ranks(), block_of_roles(params));
  const SignalWarp signal_warp = signal_warp_of(params.role_counts, lanes_of_peers(call.num_ranks()));
  if (warp.role == WarpRole::signal) signal_warp.clear();
  __syncthreads();
  if (warp.role == WarpRole::send) {
    const Movement movement(params, call, Movement::WithoutPlan{});
    Scatter rows(params, movement, pipeline);
    rows.send_without_plan(warp, [&](int64_t token) { return ranks_by_experts(params, token); });
  } else if (warp.role == WarpRole::signal) {
    signal_warp.run(call);
    if (lane() == 0) call.sent(num_senders(params));
  } else if (warp.role == WarpRole::receive) {
    receive_by_plan(params, call, pipeline, warp);
  }
}

__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    ht_prepare_dispatch_kernel(const __grid_constant__ PrepareDispatchParams<PlainRows> params) {
  pdl_wait(params);
  prepare_dispatch(params);
  leave(params.group);
}

} // namespace

const void* ht_prepare_dispatch_kernel_address() {
  return reinterpret_cast<const void*>(&ht_prepare_dispatch_kernel);
}

cudaError_t launch_ht_prepare_dispatch(const PrepareDispatchParams<PlainRows>& params, const Grid& grid,
                                       cudaStream_t stream) {
  return launch_cooperative(&ht_prepare_dispatch_kernel, grid, stream, params);
}

} // namespace epx::cuda
