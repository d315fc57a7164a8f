// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/nodes/rail_buffers.h"

#include "base/checked_math.h"
#include "base/dtypes.h"

namespace epx::cuda {
namespace {

constexpr const char* kWhat = "the rows beside the rails";

size_t count(int64_t elements) {
  return static_cast<size_t>(elements);
}

struct RowSizes {
  int64_t rows, weights, sidecars; // bytes of all nodes, each rounded up to whole regions
  int64_t node_rows, node_weights; // of one node
};

RowSizes row_sizes(const NodesShape& shape) {
  const GroupShape& group = shape.group;
  RowSizes sizes{};
  sizes.node_rows = checked_mul(shape.padded_tokens(), shape.max_back_rows(group.max_top_k), kWhat);
  sizes.node_weights = checked_mul(shape.padded_tokens(), group.max_top_k, kWhat);
  const auto bytes = [&](int64_t elements, int64_t bytes_each) {
    return checked_round_up(checked_mul(checked_mul(elements, shape.num_nodes(), kWhat), bytes_each, kWhat),
                            kRegionAlignment, kWhat);
  };
  sizes.rows = bytes(sizes.node_rows, row_bytes(group.max_token_dtype, group.hidden_dim));
  sizes.weights = bytes(sizes.node_weights, sizeof(float));
  sizes.sidecars = bytes(shape.padded_tokens(), group.max_sidecar_bytes);
  return sizes;
}

} // namespace

RailRows::RailRows(const NodesShape& shape) : memory_(make_device_memory<std::byte>(count(bytes(shape)))) {
  const RowSizes sizes = row_sizes(shape);
  area_.rows = memory_.get();
  area_.weights = reinterpret_cast<float*>(memory_.get() + sizes.rows);
  area_.sidecars = memory_.get() + sizes.rows + sizes.weights;
  area_.node_rows = sizes.node_rows;
  area_.node_weights = sizes.node_weights;
}

int64_t RailRows::bytes(const NodesShape& shape) {
  const RowSizes sizes = row_sizes(shape);
  return checked_add(checked_add(sizes.rows, sizes.weights, kWhat), sizes.sidecars, kWhat);
}

RailBuffers::RailBuffers(const NodesShape& shape)
    : state(make_device_memory<NodesState>(1)), progress(make_mapped_memory<NodesProgress>()),
      leg_headers(make_device_memory<HandleHeader>(count(shape.num_legs()))),
      sent_records(make_device_memory<int32_t>(count(shape.num_nodes() * record_words(shape)))),
      received_records(make_device_memory<int32_t>(count(shape.num_nodes() * record_words(shape)))),
      records_on_host(make_pinned_memory<int32_t>(count(2 * shape.num_nodes() * record_words(shape)))),
      counts(make_device_memory<int32_t>(
          count(int64_t{kMaxPrepareBlocks + 1 + shape.group.num_ranks} * shape.group.num_experts))),
      bad_indices(make_device_memory<uint64_t>(2)),
      sent_tables(make_device_memory<int32_t>(count(shape.num_nodes() * table_words(shape, shape.group.max_top_k)))),
      received_tables(make_device_memory<int32_t>(count(shape.num_nodes() * table_words(shape, shape.group.max_top_k)))),
      to_rails(shape), from_rails(shape), num_experts_(shape.group.num_experts) {}

NodesPrepareBuffers RailBuffers::prepare() const {
  int32_t* const own = counts.get() + kMaxPrepareBlocks * num_experts_;
  return {counts.get(), own, own + num_experts_, bad_indices.get(), sent_tables.get(), received_tables.get()};
}

int64_t RailBuffers::bytes(const NodesShape& shape) {
  const int64_t nodes = shape.num_nodes();
  const int64_t words = 2 * nodes * (record_words(shape) + table_words(shape, shape.group.max_top_k)) +
                        int64_t{kMaxPrepareBlocks + 1 + shape.group.num_ranks} * shape.group.num_experts;
  return checked_add(
      2 * RailRows::bytes(shape),
      words * static_cast<int64_t>(sizeof(int32_t)) + shape.num_legs() * static_cast<int64_t>(sizeof(HandleHeader)), kWhat);
}

} // namespace epx::cuda
