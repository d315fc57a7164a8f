// SPDX-License-Identifier: Apache-2.0
// What the two kernels of prepare_dispatch have in common: that of a rank with few tokens (prepare_dispatch.cu), and that of a
// rank with many (ht_prepare_dispatch.cu).
#pragma once

#include "runtime/stages/cuda/expert_ranks.cuh"
#include "runtime/stages/cuda/prepare/prepare_steps.cuh"
#include "runtime/stages/cuda/protocol/plan_parts.cuh"
#include "runtime/stages/cuda/scatter/scatter.cuh"

namespace epx::cuda {

static_assert(kThreads == kMovementThreads);

template <typename Format>
struct PrepareDispatchParams : ScatterParams<MixedDispatch<Format>> {
  PrepareCall prepare;
  ExpertRanks experts;
  PrepareDispatchBlocks blocks;
};

cudaError_t launch_ht_prepare_dispatch(const PrepareDispatchParams<PlainRows>& params, const Grid& grid,
                                       cudaStream_t stream);

// Returns the rank of the expert of each of a token's routes; -1: it is masked, its index is bad, or there is no such route.
template <typename Format>
__device__ inline PerRoute<int> ranks_by_experts(const PrepareDispatchParams<Format>& params, int64_t token) {
  const int top_k = params.call.top_k;
  const auto rank_of = [&](int k) {
    if (k >= top_k) return -1;
    const int64_t index = index_at(params.prepare, route_index(token, top_k, k));
    return index >= 0 && index < params.experts.blocks.num_experts ? params.experts.rank_of(static_cast<int>(index)) : -1;
  };
  return {rank_of(lane()), rank_of(lane() + kWarp)};
}

// A warp receives rows once the whole plan is there, which the first blocks of the grid make: from each source by its own path.
template <typename Format>
__device__ __forceinline__ void receive_by_plan(const PrepareDispatchParams<Format>& params, const CallSession& call,
                                                TmaRowPipeline& pipeline, const WarpAssignment& warp) {
  if (!wait_for_plan_parts(params.group, call, 0, static_cast<int>(params.blocks.prepare))) return;
  const Movement movement(params, call);
  if (!movement.is_usable()) return; // the group has failed
  const Scatter scatter(params, movement, pipeline);
  if (params.operation.clears_pads()) scatter.clear_pads(warp);
  scatter.receive(warp);
  receive_ll_peers(params, call, warp, pipeline);
}

} // namespace epx::cuda
