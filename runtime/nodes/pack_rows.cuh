// SPDX-License-Identifier: Apache-2.0
// Rows of a scatter beside the rails: those of the tokens that go to other nodes are packed, in the form in which they travel.
// See multi_node_rows.cu.
#pragma once

#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/row_sender.cuh"

namespace epx::cuda {

struct PackParams {
  MultiNodeCall nodes;
  PackCall call;
  int64_t row_bytes;      // of the call's rows
  int64_t rail_row_bytes; // of packed rows
};

// The rows of one token in an area, by its index among those of a node.
class PackedRows {
public:
  __device__ PackedRows(const PackParams& params, int node, int64_t position)
      : call_(params.call), row_bytes_(params.rail_row_bytes), node_(node), position_(position) {}

  __device__ std::byte* row() const { return call_.area.rows_of(node_, row_bytes_) + position_ * row_bytes_; }
  __device__ std::byte* sidecar() const {
    return call_.area.sidecars_of(node_, call_.sidecar_bytes) + position_ * call_.sidecar_bytes;
  }
  __device__ float* weights() const { return call_.area.weights_of(node_) + position_ * call_.top_k; }

private:
  const PackCall& call_;
  int64_t row_bytes_;
  int node_;
  int64_t position_;
};

// Each warp moves one row at a time, of the other nodes in turn. Behind the tokens that go to a node, and in damaged handle
// memory anywhere, the list has numbers that are no tokens of this rank.
template <typename Format>
__device__ inline void pack_rows(const PackParams& params, TmaRowPipeline& pipeline) {
  const PackCall& call = params.call;
  const MultiNodeShape& shape = params.nodes.shape;
  const MultiNodeHandleReader plan(call.handle_mem, params.nodes.layout, shape);
  const WorkPartition warp = partition_warps(0, kMovementWarps, 0, static_cast<int>(gridDim.x));
  const auto others = static_cast<unsigned>(shape.num_nodes() - 1);
  const auto rows = others * static_cast<unsigned>(shape.chunk_tokens());
  const SourceTensors from{call.rows, params.row_bytes, call.sidecars, call.sidecars != nullptr ? call.sidecar_bytes : 0};
  const WarpRoleCounts no_signals{};
  RowSender<Format> sender(pipeline, no_signals, 0, Format(call));
#pragma unroll 1
  for (auto i = static_cast<unsigned>(warp.index); i < rows; i += static_cast<unsigned>(warp.count)) {
    const auto other = static_cast<int>(i % others);
    const int node = other < shape.own_node ? other : other + 1;
    const int64_t position = int64_t{call.chunk} * shape.chunk_tokens() + static_cast<int64_t>(i / others);
    const int64_t token = plan.sent_tokens(node)[position];
    if (token < 0 || token >= call.num_tokens) continue;
    const PackedRows packed(params, node, position);
    sender.send(from, token,
                lane() == 0 ? SendPlaces{{packed.row(), packed.row()}, packed.sidecar(), nullptr} : SendPlaces{});
    if (call.weights != nullptr)
      for (int k = lane(); k < call.top_k; k += kWarp)
        packed.weights()[k] = call.weights[route_index(token, call.top_k, k)];
  }
  sender.close();
}

} // namespace epx::cuda
