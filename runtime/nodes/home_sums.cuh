// SPDX-License-Identifier: Apache-2.0
// The end of a gather: the home rank sums what has come of its tokens from all nodes. See multi_node_rows.cu.
#pragma once

#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/nodes/rail_records.h"
#include "runtime/nodes/rail_sums.cuh"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

struct SumParams {
  MultiNodeCall nodes;
  SumCall call;
};

// Each warp has one. Handle memory is not trusted: a row that the area does not have takes no step, and no sum has more terms
// than a token can have routes.
template <typename Sums>
class HomeSums {
  using T = typename Sums::Element;

public:
  __device__ HomeSums(const SumParams& params, TmaRowPipeline& pipeline)
      : params_(params), args_(params.call.call), shape_(params.nodes.shape),
        plan_(args_.handle_mem, params.nodes.layout, params.nodes.shape),
        records_(params.nodes.shape, params.nodes.received_records), pipeline_(pipeline), sums_(args_) {}

  __device__ void sum(const WorkPartition& warp) const {
#pragma unroll 1
    for (int64_t token = warp.index; token < args_.num_tokens; token += warp.count) {
      const bool is_exact = Sums::kTakesExact && shape_.group.precision == EPX_COMBINE_EXACT;
      PerRoute<int32_t> nodes{-1, -1};
      if (is_exact || params_.call.weight_grads_out != nullptr) nodes = nodes_of_routes(token);
      const SumTerms<T> terms = is_exact ? terms_of_routes(token, nodes) : terms_of_nodes(token);
      sums_.sum(pipeline_, terms, reinterpret_cast<T*>(params_.call.out) + token * args_.hidden);
      if (params_.call.weight_grads_out == nullptr) continue;
      store_weight(token, lane(), nodes.low);
      store_weight(token, kWarp + lane(), nodes.high);
    }
  }

private:
  // Consecutive rows of a node's part of the area.
  struct Rows {
    int64_t first;
    int64_t count;
  };

  __device__ int node_rows() const {
    return static_cast<int>(params_.call.area.node_rows);
  }
  // Its type is that of terms: a row with a format is a WireRow.
  __device__ const T* row_at(int node, int64_t row) const {
    return reinterpret_cast<const T*>(params_.call.area.rows_of(node, sums_.row_bytes()) + row * sums_.row_bytes());
  }

  // Returns the node of each route that was kept; -1: it was not, or nothing comes from that node, whose rail peer is not
  // active.
  __device__ PerRoute<int32_t> nodes_of_routes(int64_t token) const {
    const HandleLimits limits(shape_.group, args_.top_k, shape_.group.max_recv_tokens);
    const auto node_of = [&](int k) {
      if (k >= args_.top_k) return -1;
      const Route route = plan_.home_routes[route_index(token, args_.top_k, k)];
      if (!limits.is_route(route)) return -1;
      const int node = shape_.group.node_of(route.rank);
      return records_.is_active(node) ? node : -1;
    };
    return {node_of(lane()), node_of(lane() + kWarp)};
  }
  // Returns the index of a token among those that go to a node; -1: there is none.
  __device__ int64_t position_of(int node, int64_t token) const {
    const int64_t position = plan_.positions(node)[token];
    return position < shape_.padded_tokens() ? position : -1;
  }
  // Returns the rows that have come of a token from a node.
  __device__ Rows rows_of(int node, int64_t token) const {
    const int64_t position = position_of(node, token);
    if (position < 0 || !records_.is_active(node)) return {0, 0};
    if (shape_.group.sums_by_node()) return {position, 1};
    const int64_t first = plan_.home_back_rows(node)[position];
    const int64_t end = plan_.home_back_rows(node)[position + 1];
    if (first < 0 || end > node_rows()) return {0, 0};
    return {first, max(int64_t{0}, min(end - first, int64_t{shape_.max_back_rows(args_.top_k)}))};
  }

  // Precisions node and wire: all rows, by node and in the order in which they lie there.
  __device__ SumTerms<T> terms_of_nodes(int64_t token) const {
    SumTerms<T> terms;
#pragma unroll 1
    for (int first = 0; first < shape_.num_nodes(); first += kWarp) {
      const int node = first + lane(); // which this lane looks up
      const Rows found = node < shape_.num_nodes() ? rows_of(node, token) : Rows{0, 0};
#pragma unroll 1
      for (unsigned left = __ballot_sync(~0u, found.count > 0 ? 1 : 0); left != 0; left &= left - 1) {
        const int one = lowest_bit(left);
        const Rows rows{from_lane(found.first, one), from_lane(found.count, one)};
#pragma unroll 1
        for (int64_t i = 0; i < rows.count && terms.size() < kMaxTopK; ++i)
          terms.append(row_at(first + one, rows.first + i));
      }
    }
    return terms;
  }

  // Precision exact: the routes' rows, in k order. A node's are in k order, too.
  __device__ SumTerms<T> terms_of_routes(int64_t token, const PerRoute<int32_t>& nodes) const {
    PerRoute<int32_t> earlier{0, 0}; // how many routes of lower k have come from the same node
#pragma unroll 1
    for (int k = 0; k < args_.top_k; ++k) {
      const int32_t node = nodes[k];
      if (k < lane() && node == nodes.low) ++earlier.low;
      if (k < lane() + kWarp && node == nodes.high) ++earlier.high;
    }
    const PerRoute<int32_t> rows{row_of_route(token, nodes.low, earlier.low),
                                 row_of_route(token, nodes.high, earlier.high)};
    const PerRoute<float> weights{weight_of_row(nodes.low, rows.low), weight_of_row(nodes.high, rows.high)};
    SumTerms<T> terms;
#pragma unroll 1
    for (uint64_t left = rows.mask_of([](int32_t row) { return row >= 0; }); left != 0; left &= left - 1) {
      const int k = lowest_bit(left);
      terms.append(row_at(nodes[k], rows[k]), weights[k]);
    }
    return terms;
  }
  // Returns the row of the lane's route, or -1.
  __device__ int32_t row_of_route(int64_t token, int node, int earlier) const {
    if (node < 0) return -1;
    const Rows rows = rows_of(node, token);
    return earlier < rows.count ? static_cast<int32_t>(rows.first + earlier) : -1;
  }
  __device__ float weight_of_row(int node, int32_t row) const {
    return params_.call.is_weighted && row >= 0 ? params_.call.area.weights_of(node)[row] : 1.0f;
  }

  // Stores the weight that has come for the lane's route.
  __device__ void store_weight(int64_t token, int k, int node) const {
    if (k >= args_.top_k) return;
    float weight = 0.0f;
    if (node >= 0)
      if (const int64_t position = position_of(node, token); position >= 0)
        weight = params_.call.area.weights_of(node)[route_index(position, args_.top_k, k)];
    params_.call.weight_grads_out[route_index(token, args_.top_k, k)] = weight;
  }

  const SumParams& params_;
  const MovementCall& args_;
  const MultiNodeShape& shape_;
  MultiNodeHandleReader plan_;
  RailRecords records_;
  TmaRowPipeline& pipeline_;
  Sums sums_;
};

} // namespace epx::cuda
