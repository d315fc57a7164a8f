// SPDX-License-Identifier: Apache-2.0
// Rows of a gather on their way home, in the precisions wire and exact: behind a leg, the relay copies what the ranks of the
// node have staged on it for the leg's tokens, and adds what its own slots contribute. See multi_node_rows.cu.
#pragma once

#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/nodes/rail_sums.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"
#include "runtime/stages/cuda/rows/staging.cuh"

namespace epx::cuda {

struct ForwardTensors {
  const std::byte* rows;    // [N, H]: this rank's own
  const float* row_weights; // [N]; may be NULL
  RailArea area;
};

// The movement is that of the leg, whose call has ended on this rank.
struct ForwardParams : MovementParams, ForwardTensors {
  MultiNodeShape shape;
  MultiNodeHandleLayout nodes_layout;
  int node; // of the leg
  int chunk;
};

// Each warp has one. The staged rows are those that gather.cu has waited for.
template <typename Sums>
class RowForwarder {
  using T = typename Sums::Element;

public:
  __device__ RowForwarder(const ForwardParams& params, const Movement& movement, TmaRowPipeline& pipeline)
      : params_(params), args_(params.call), movement_(movement), pipeline_(pipeline), staging_(params.group),
        sums_(params.call), is_exact_(Sums::kTakesExact && params.group.context.shape.precision == EPX_COMBINE_EXACT) {}

  __device__ void forward(const WorkPartition& warp) const {
#pragma unroll 1
    for (int64_t token = warp.index; token < args_.num_tokens; token += warp.count) {
      const int64_t first_row = first_row_of(token);
      if (first_row < 0) continue; // damaged handle memory
      const WarpRoutes routes = movement_.routes_of(token);
      const uint64_t kept = routes.mask_of([](const Route& route) { return route.slot >= 0; });
      const uint64_t live = routes.mask_of([&](const Route& route) { return movement_.is_live(route); });
      const uint64_t own = live & routes.mask_of([&](const Route& route) { return route.rank == movement_.call().rank(); });
      if (is_exact_)
        forward_routes(token, first_row, routes, kept, live, own);
      else
        forward_partials(token, first_row, routes, kept, live, own);
    }
    pipeline_.finish();
  }

private:
  // The row of the area at which what goes home of a token begins.
  __device__ int64_t first_row_of(int64_t token) const {
    const MultiNodeHandleReader plan(args_.handle_mem, params_.nodes_layout, params_.shape);
    const int64_t position = int64_t{params_.chunk} * params_.shape.chunk_tokens() + token;
    return params_.node == params_.shape.own_node ? plan.home_back_rows(params_.node)[position]
                                                  : plan.relay_back_rows(params_.node)[position];
  }
  __device__ std::byte* row_at(int64_t row) const {
    return params_.area.rows_of(params_.node, sums_.row_bytes()) + row * sums_.row_bytes();
  }
  __device__ const T* own_row(int32_t slot) const {
    return reinterpret_cast<const T*>(params_.rows) + slot * static_cast<int64_t>(args_.hidden);
  }
  __device__ float own_weight(int32_t slot) const {
    return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
  }
  __device__ const std::byte* staged_row(int64_t row) const {
    return staging_.row(params_.group.context.rank, row);
  }
  __device__ float staged_weight(int64_t route) const {
    return staging_.weights(params_.group.context.rank)[route];
  }
  __device__ void copy_row(const std::byte* from, std::byte* to) const {
    begin_copy_row_to_destinations(pipeline_, from, sums_.row_bytes(), lane() == 0 ? to : nullptr);
  }

  // Precision wire. `kept`, `live` and `own` have a bit for each route: it was kept by prepare; is live; and is this rank's
  // own. Of each rank with a kept route one row goes home, at its rank ordinal.
  __device__ void forward_partials(int64_t token, int64_t first_row, const WarpRoutes& routes, uint64_t kept, uint64_t live,
                                   uint64_t own) const {
    uint64_t kept_ranks = 0, live_ranks = 0; // bits of rank ordinals
    int own_ordinal = -1;
#pragma unroll 1
    for (uint64_t left = kept; left != 0; left &= left - 1) {
      const int k = lowest_bit(left);
      const int ordinal = movement_.rank_ordinal_of(routes.rank_ordinal(k));
      kept_ranks |= uint64_t{1} << ordinal;
      live_ranks |= (live >> k & 1) << ordinal;
      if ((own >> k & 1) != 0) own_ordinal = ordinal;
    }
#pragma unroll 1
    for (uint64_t left = kept_ranks; left != 0; left &= left - 1) {
      const int ordinal = lowest_bit(left);
      if (first_row + ordinal >= params_.area.node_rows) return;
      std::byte* const to = row_at(first_row + ordinal);
      if (ordinal == own_ordinal)
        sums_.send(pipeline_, own_terms(routes, own), to);
      else if ((live_ranks >> ordinal & 1) != 0)
        copy_row(staged_row(staging_.row_of(token, args_.top_k, ordinal)), to);
      else
        sums_.send_identity(to);
    }
  }
  // This rank's slots of a token, in k order.
  __device__ SumTerms<T> own_terms(const WarpRoutes& routes, uint64_t own) const {
    const PerRoute<float> weights{own_weight((own >> lane() & 1) != 0 ? routes.low.slot : -1),
                                  own_weight((own >> kWarp >> lane() & 1) != 0 ? routes.high.slot : -1)};
    SumTerms<T> terms;
#pragma unroll 1
    for (uint64_t left = own; left != 0; left &= left - 1) {
      const int k = lowest_bit(left);
      terms.append(own_row(routes.slot(k)), weights[k]);
    }
    return terms;
  }

  // Precision exact: one row goes home of each kept route.
  __device__ void forward_routes(int64_t token, int64_t first_row, const WarpRoutes& routes, uint64_t kept, uint64_t live,
                                 uint64_t own) const {
    int64_t row = first_row;
#pragma unroll 1
    for (uint64_t left = kept; left != 0 && row < params_.area.node_rows; left &= left - 1, ++row) {
      const int k = lowest_bit(left);
      const int32_t slot = routes.slot(k);
      const int64_t route = route_index(token, args_.top_k, k);
      const bool is_live = (live >> k & 1) != 0, is_own = (own >> k & 1) != 0;
      if (is_live)
        copy_row(is_own ? reinterpret_cast<const std::byte*>(own_row(slot)) : staged_row(route), row_at(row));
      else
        sums_.send_identity(row_at(row));
      if (params_.row_weights != nullptr && lane() == 0)
        params_.area.weights_of(params_.node)[row] = !is_live ? 0.0f : is_own ? own_weight(slot) : staged_weight(route);
    }
  }

  const ForwardParams& params_;
  const MovementCall& args_;
  const Movement& movement_;
  TmaRowPipeline& pipeline_;
  GatherStaging staging_;
  Sums sums_;
  bool is_exact_;
};

} // namespace epx::cuda
