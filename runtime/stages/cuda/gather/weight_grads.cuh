// SPDX-License-Identifier: Apache-2.0
// The gradients of weights, which come home beside the rows of dispatch_bwd: expert-major one for each slot, rank-major one for
// each k of a row.
#pragma once

#include "runtime/stages/cuda/gather/gather_params.h"
#include "runtime/stages/cuda/movement.cuh"

namespace epx::cuda {

// The gradient of the weight of route k of the token in a slot of this rank.
template <bool kRankMajor>
__device__ inline float weight_grad_of(const GatherParams& params, const Movement& movement, int32_t slot, int k) {
  const MovementCall& call = params.call;
  if constexpr (kRankMajor) return params.weight_grads[movement.row_of_slot(slot) * call.top_k + k];
  return params.weight_grads[call.is_rank_major() ? call.row_of_slot(slot) * call.top_k + k : slot]; // see LlGather
}

// Rank-major: calls send(k, gradient) for each k of the row in a slot that goes to this rank. The lanes share the k.
template <typename Send>
__device__ inline void for_each_weight_grad(const GatherParams& params, const Movement& movement, int32_t slot,
                                            const Send& send) {
  const uint64_t mask = movement.mask_of_row(slot);
  for (int k = lane(); k < params.call.top_k; k += kWarp)
    if ((mask >> k & 1) != 0) send(k, weight_grad_of<true>(params, movement, slot, k));
}

// One lane stores the gradient that has come home on route k of a token of this rank; slot -1: the route is not live, and the
// gradient is 0. fetch(gradient) gets that of a peer, or returns false when the group has failed; this function then returns
// false, too.
template <bool kRankMajor, typename Fetch>
__device__ inline bool collect_weight_grad(const GatherParams& params, const Movement& movement, int64_t token, int k,
                                           const Route& route, const Fetch& fetch) {
  float grad = 0.0f;
  if (route.slot >= 0 && route.rank == params.group.context.rank)
    grad = weight_grad_of<kRankMajor>(params, movement, route.slot, k);
  else if (route.slot >= 0 && !fetch(grad))
    return false;
  params.weight_grads_out[route_index(token, params.call.top_k, k)] = grad;
  return true;
}

} // namespace epx::cuda
