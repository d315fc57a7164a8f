// SPDX-License-Identifier: Apache-2.0
// What the high-throughput kernels of combine and dispatch_bwd know of rows: where a split of one lies, what it waits for, and
// which weights come home beside it. Rows are signaled in splits: each half of H has a ready flag of its own, or all of H where
// rows are short.
#pragma once

#include <cmath>

#include "runtime/stages/cuda/gather/gather_params.h"
#include "runtime/stages/cuda/gather/weight_grads.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"
#include "runtime/stages/cuda/rows/staging.cuh"

namespace epx::cuda {

// Elements [first, first + size) of a row, which are `count` splits from `index` on.
struct RowSplits {
  int index;
  int count;
  int64_t first;
  int64_t size;
};

template <typename T>
class GatherRows {
public:
  __device__ GatherRows(const GatherParams& params, const CallSession& call)
      : params_(params), call_(call), staging_(params.group) {
    constexpr int64_t kHTile = RowReader<T, true>::kHTile;
    const int64_t h_tiles = (params.call.hidden + kHTile - 1) / kHTile;
    num_splits_ = h_tiles < kMinHTilesToSplit ? 1 : kMaxRowSplits;
    split_size_ = (num_splits_ == 1 ? h_tiles : (h_tiles + kMaxRowSplits - 1) / kMaxRowSplits) * kHTile;
  }

  __device__ int num_splits() const { return num_splits_; }
  // Returns `count` splits from `index` on.
  __device__ RowSplits splits(int index, int count) const {
    const int64_t first = index * split_size_;
    return {index, count, first, min(params_.call.hidden - first, count * split_size_)};
  }

  // `row`: of the receive tensors.
  __device__ const T* row_at(int64_t row, const RowSplits& split) const {
    return reinterpret_cast<const T*>(params_.rows) + row * params_.call.hidden + split.first;
  }
  __device__ T* out(int64_t token, const RowSplits& split) const {
    return reinterpret_cast<T*>(params_.out) + token * params_.call.hidden + split.first;
  }
  __device__ T* staged_row(int home, int64_t row, const RowSplits& split) const {
    return reinterpret_cast<T*>(staging_.row(home, row)) + split.first;
  }
  // Precision wire: the sum of a rank, which is one of those that the token goes to.
  __device__ T* staged_sum(int home, int64_t token, int rank_ordinal, const RowSplits& split) const {
    return staged_row(home, staging_.row_of(token, params_.call.top_k, rank_ordinal), split);
  }
  __device__ float* staged_weights(int home) const { return staging_.weights(home); } // by route_index()
  // The ready flag of the first of these splits; those of the others follow.
  __device__ Epoch* ready_flag_at(int home, int64_t token, int rank_ordinal, const RowSplits& split) const {
    return staging_.ready_flag(home, staging_.row_of(token, params_.call.top_k, rank_ordinal), split.index);
  }

  // One lane waits until `rank`, which has the rank ordinal among those that the token goes to, has signaled these splits.
  // Returns false when the group has failed.
  __device__ bool wait_ready(int64_t token, int rank_ordinal, int rank, const RowSplits& split) const {
    bool ok = true;
    for (int i = 0; i < split.count && ok; ++i)
      ok = call_.wait_ready(ready_flag_at(call_.rank(), token, rank_ordinal, split) + i, rank);
    return ok;
  }

  // Each lane waits for the ready flags of its routes' ranks. `awaited` has a bit for each route. Returns false, in all lanes,
  // when the group has failed.
  __device__ bool wait_for_peers(const Movement& movement, int64_t token, const RowSplits& split, const WarpRoutes& routes,
                                 uint64_t awaited) const {
    bool ok = true;
    for (int first = 0; first < params_.call.top_k; first += kWarp)
      if (const Route route = routes.own(first); ok && (awaited >> (first + lane()) & 1) != 0)
        ok = wait_ready(token, movement.rank_ordinal_of(route.rank_ordinal), route.rank, split);
    const bool all = __all_sync(~0u, ok ? 1 : 0) != 0;
    __syncwarp(); // all lanes see what each has acquired: a vote orders no memory
    return all;
  }

  // Returns the weight in the sum of this rank's own row in a slot; -1: there is none.
  __device__ float weight_of(int32_t slot) const {
    return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
  }
  // Expert-major: one lane stores the weight's gradient that has come home on a route of this rank, behind its ready flag; 0 if
  // the route is not live. That of weight_grads.cuh makes the low-latency path of the same kernel spill registers in its loop.
  __device__ void collect_weight_grad(int64_t token, int k, const Route& route, bool is_live) const {
    const int64_t index = route_index(token, params_.call.top_k, k);
    float grad = 0.0f;
    if (is_live) grad = route.rank == call_.rank() ? params_.weight_grads[route.slot] : staged_weights(call_.rank())[index];
    params_.weight_grads_out[index] = grad;
  }
  // Rank-major: the gradients of a token whose row is in a slot of this rank, and those that have come home.
  __device__ void send_weight_grads(const Movement& movement, int home, int64_t token, int32_t slot) const {
    for_each_weight_grad(params_, movement, slot, [&](int k, float grad) {
      staged_weights(home)[route_index(token, params_.call.top_k, k)] = grad;
    });
  }
  __device__ void collect_weight_grads(const Movement& movement, int64_t token) const {
    for (int k = lane(); k < params_.call.top_k; k += kWarp)
      cuda::collect_weight_grad<true>(params_, movement, token, k, movement.kept_route(token, k), [&](float& grad) {
        grad = staged_weights(call_.rank())[route_index(token, params_.call.top_k, k)];
        return true;
      });
  }
  // Tests overwrite staging once it has been used: scribble(row) overwrites these splits of a staged row.
  template <typename Scribble>
  __device__ void scribble_staging(int64_t token, const RowSplits& split, const Scribble& scribble) const {
    const bool is_exact = shape().precision == EPX_COMBINE_EXACT;
    const int top_k = params_.call.top_k;
    const int per_token = is_exact ? top_k : min(top_k, call_.num_ranks());
    for (int64_t row = token * per_token; row < (token + 1) * per_token; ++row)
      scribble(staging_.row(call_.rank(), row));
    // In precision exact both splits read the staged weights.
    if (is_exact ? split.count < num_splits_ : split.first != 0) return;
    for (int k = lane(); k < top_k; k += kWarp)
      staged_weights(call_.rank())[route_index(token, top_k, k)] = NAN;
  }
  __device__ void scribble_staging(int64_t token, const RowSplits& split) const { // of rows of T
    scribble_staging(token, split, [&](std::byte* row) {
      scribble_row(row + split.first * static_cast<int64_t>(sizeof(T)), split.size * static_cast<int64_t>(sizeof(T)));
    });
  }

private:
  // Shorter rows are not split: each split looks up its token's routes and waits for flags.
  static constexpr int kMinHTilesToSplit = 4;

  __device__ const GroupShape& shape() const { return params_.group.context.shape; }

  const GatherParams& params_;
  const CallSession& call_;
  GatherStaging staging_;
  int num_splits_;
  int64_t split_size_; // elements
};

} // namespace epx::cuda
