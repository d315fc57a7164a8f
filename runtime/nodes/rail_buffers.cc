// SPDX-License-Identifier: Apache-2.0
#include "runtime/nodes/rail_buffers.h"

#include "runtime/layout/rail_layout.h"

namespace epx::cuda {
namespace {

size_t count(int64_t elements) {
  return static_cast<size_t>(elements);
}

} // namespace

RailRows::RailRows(const MultiNodeShape& shape) {
  const RailRowsLayout layout = make_rail_rows_layout(shape);
  memory_ = make_device_memory<std::byte>(count(layout.total_bytes));
  area_.rows = memory_.get();
  area_.weights = reinterpret_cast<float*>(memory_.get() + layout.all_rows_bytes);
  area_.sidecars = memory_.get() + layout.all_rows_bytes + layout.all_weights_bytes;
  area_.node_rows = layout.node_rows;
  area_.node_weights = layout.node_weights;
  area_.node_tokens = shape.padded_tokens();
}

RailBuffers::RailBuffers(const MultiNodeShape& shape)
    : state(make_device_memory<MultiNodeState>(1)), progress(make_mapped_memory<MultiNodeProgress>()),
      leg_headers(make_device_memory<HandleHeader>(count(shape.num_legs()))),
      sent_records(make_device_memory<int32_t>(count(shape.num_nodes() * record_words(shape)))),
      received_records(make_device_memory<int32_t>(count(shape.num_nodes() * record_words(shape)))),
      records_on_host(make_pinned_memory<int32_t>(count(int64_t{2} * shape.num_nodes() * record_words(shape)))),
      block_counts(make_device_memory<int32_t>(count(int64_t{kMaxPrepareBlocks} * shape.group.num_experts))),
      counts(make_device_memory<int32_t>(count((int64_t{1} + shape.group.num_ranks) * count_words(shape.group)))),
      totals(make_device_memory<MultiNodePrepareTotals>(1)),
      token_ends(make_device_memory<int32_t>(count(shape.num_nodes()))),
      sent_tables(make_device_memory<int32_t>(count(shape.num_nodes() * table_words(shape)))),
      received_tables(make_device_memory<int32_t>(count(shape.num_nodes() * table_words(shape)))), to_rails(shape),
      from_rails(shape), count_words_(count_words(shape.group)) {}

MultiNodePrepareBuffers RailBuffers::prepare() const {
  return {block_counts.get(), counts.get(),      counts.get() + count_words_, totals.get(),
          token_ends.get(),   sent_tables.get(), received_tables.get()};
}

} // namespace epx::cuda
