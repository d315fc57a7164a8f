// SPDX-License-Identifier: Apache-2.0
// The indices of topk_idx, and bad ones among them: those that are neither -1 nor the number of an expert.
#pragma once

#include <cstdint>

#include "runtime/stages/cuda/protocol/events.cuh"

namespace epx::cuda {

// The number of bad indices, and the first of them as ~ of its route, so that atomicMax finds it.
struct BadIndices {
  int32_t number;
  unsigned first_inverted;
};

// Returns the index of a route of this rank; `args` are those of a call that has topk_idx.
template <typename Call>
__device__ __forceinline__ int64_t index_at(const Call& args, int64_t route) {
  return args.topk_idx_is_64 ? static_cast<const int64_t*>(args.topk_idx)[route]
                             : static_cast<const int32_t*>(args.topk_idx)[route];
}

// One thread calls this for a route whose index is bad. Others may do so for the same `bad`.
__device__ __forceinline__ void count_bad_index(BadIndices& bad, uint32_t route) {
  atomicAdd(&bad.number, 1);
  atomicMax(&bad.first_inverted, ~route);
}

// One thread of the rank calls this with the bad indices of all its routes.
template <typename Call>
__device__ __forceinline__ void report_bad_indices(const CallContext& call, const Call& args, BadIndices bad) {
  if (bad.number == 0) return;
  const uint32_t first = ~bad.first_inverted;
  const auto top_k = static_cast<uint32_t>(args.top_k);
  record_event(call, EPX_EVENT_BAD_INDEX, bad.number, bad.number, index_at(args, first), first / top_k, first % top_k);
}

} // namespace epx::cuda
