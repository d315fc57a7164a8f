// SPDX-License-Identifier: Apache-2.0
// The steps of prepare before and behind the entry barrier, for the kernels that contain it. See prepare.cu.
#pragma once

#include "runtime/stages/cuda/prepare/count_exchange.cuh"
#include "runtime/stages/cuda/prepare/routing_all_gather.cuh"

namespace epx::cuda {

// Returns the number of tokens of the rank that has the most; behind the entry barrier.
__device__ __forceinline__ int32_t max_tokens_of_ranks(const PrepareContext& c) {
  int32_t tokens = 0;
#pragma unroll 1
  for (int rank = lane(); rank < c.shape.num_ranks; rank += kWarp)
    tokens = max(tokens, tokens_of(c, rank));
  return static_cast<int32_t>(__reduce_max_sync(~0u, static_cast<unsigned>(tokens)));
}

// The blocks that prepare call this before anything else, even before they have a context: peers wait for the descriptor.
__device__ __forceinline__ void begin_prepare(const CallSession& call, const CallDescriptor& descriptor,
                                              PrepareShared& shared) {
  if (blockIdx.x == 0) call.post(descriptor, call.sequence()); // which is the id of the new plan
  if (threadIdx.x == 0) shared.dropped_routes = 0;
}

// Before the entry barrier, once the block has begun (CallSession::begin). Returns false, the same in all threads, when the
// group has failed.
__device__ __forceinline__ bool publish(const PrepareContext& c) {
  if (!fits_all_gather(c, c.args.num_tokens)) return publish_counts(c);
  publish_routes(c);
  return true;
}

struct PreparedPart {
  bool ok;         // false, in some threads of the block or in all, when the group has failed
  bool has_totals; // the block has delivered the totals
};
// Behind the entry barrier.
__device__ __forceinline__ PreparedPart prepare_behind_entry(const PrepareContext& c) {
  if (const int32_t max_tokens = max_tokens_of_ranks(c); fits_all_gather(c, max_tokens))
    return {routing_all_gather(c, max_tokens), is_all_gather_leader(c)};
  if (fits_all_gather(c, c.args.num_tokens) && !publish_counts(c)) // the routes of another rank do not fit
    return {false, false};
  return {count_exchange(c), blockIdx.x == 0};
}

} // namespace epx::cuda
