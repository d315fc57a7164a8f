// SPDX-License-Identifier: Apache-2.0
// The kernel of a scatter, and its launch: scatter.cu has the instances of dispatch, combine_bwd.cu those of combine_bwd.
#pragma once

#include <type_traits>

#include "base/device/launch.h"
#include "runtime/stages/cuda/kernels.h"
#include "runtime/stages/cuda/scatter/ll_dispatch.cuh"
#include "runtime/stages/cuda/scatter/scatter.cuh"

namespace epx::cuda {

template <bool kUnaligned, typename Format>
__device__ void ll_scatter(const ScatterParams<Dispatch<Format>>& params, Movement& movement) {
  if (!movement.call().begin_ll()) return;
  const LlDispatch<typename Format::template LlChunks<kUnaligned>> dispatch(params, movement, params.operation.call);
  if (dispatch.is_pad_warp()) {
    TmaRowPipeline pipeline = pipeline_of_warp();
    Scatter(params, movement, pipeline).clear_pads(dispatch.pad_partition());
    pipeline.finish();
    return;
  }
  dispatch.send();
  movement.call().sent_by_warp(dispatch.num_copy_warps());
  dispatch.receive();
}
// Not inlined: a kernel would have more registers for it than for the rest.
template <bool kUnaligned, typename Format>
__device__ __noinline__ void ll_scatter_apart(const ScatterParams<Dispatch<Format>>& params, Movement movement) {
  ll_scatter<kUnaligned>(params, movement);
}
template <typename Format>
__device__ __forceinline__ void ll_scatter(const ScatterParams<Dispatch<Format>>& params, Movement& movement) {
  if (has_unaligned_rows(params.operation.call))
    ll_scatter_apart<true>(params, movement);
  else if constexpr (Format::kIsReceiveFormat)
    ll_scatter<false>(params, movement);
  else
    ll_scatter_apart<false>(params, movement);
}

template <typename Operation>
__device__ __forceinline__ Movement movement_of(const ScatterParams<Operation>& params) {
  if constexpr (Operation::kMixesPaths)
    return {params, CallSession(params.group, params.call.operation, CallSession::kContinues)};
  else
    return Movement(params);
}

template <typename Operation>
__device__ __forceinline__ void scatter(const ScatterParams<Operation>& params) {
  Movement movement = movement_of(params);
  if constexpr (!Operation::kMixesPaths) movement.post(); // the first half of the call has posted
  if constexpr (std::is_same_v<Operation, Dispatch<typename Operation::Format>>) {
    if (movement.takes_ll_path()) {
      ll_scatter(params, movement);
      return;
    }
  }
  TmaRowPipeline pipeline = pipeline_of_warp();
  Scatter scatter(params, movement, pipeline);
  WarpAssignment warp = assign_warp_role(params.role_counts, params.group.context.shape.num_ranks);
  if (warp.role == WarpRole::receive && movement.is_usable() && params.operation.clears_pads())
    scatter.clear_pads(warp); // needs no peer, and overlaps the entry barrier
  if (warp.role == WarpRole::signal) scatter.signal_warp().clear();
  if (!movement.begin()) {
    pipeline.finish();
    return;
  }
  warp = send_and_signal(scatter, movement.call(), params.role_counts, warp);
  if (warp.role == WarpRole::receive) {
    scatter.receive(warp);
    if constexpr (Operation::kMixesPaths) receive_ll_peers(params, movement.call(), warp, pipeline);
  }
}

template <typename Operation>
__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    scatter_kernel(const __grid_constant__ ScatterParams<Operation> params) {
  pdl_wait(params);
  scatter(params);
  leave(params.group);
}

template <typename Operation>
cudaError_t launch_scatter(const Launcher& launcher, const Operation& operation, const CallDescriptor& descriptor) {
  const auto& call = operation.call;
  const int alignment = operation.clears_pads() ? call.alignment : 1; // of zones that have pads to clear
  const auto [grid, role_counts] = launcher.plan.next_scatter(call.num_tokens, operation.row_bytes, alignment,
                                                              sender_work_of(call, Scatter<Operation>::kMaySendOwnRows),
                                                              ReceiverWork::rows, launcher.stream);
  MovementParams movement = make_movement_params(launcher.group, role_counts, call, descriptor);
  if (!call.is_rank_major() && launcher.plan.stages_rows(grid.blocks, row_bytes(call.recv_dtype, call.hidden)))
    movement.descriptor.stages_rows = 1;
  const ScatterParams<Operation> params{movement, operation};
  return launch_cooperative(&scatter_kernel<Operation>, grid, launcher.stream, params);
}

} // namespace epx::cuda
