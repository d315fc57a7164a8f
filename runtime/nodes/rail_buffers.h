// SPDX-License-Identifier: Apache-2.0
// The memory of a group of several nodes beside the node's window: what goes to and comes from the rails.
#pragma once

#include <cstdint>

#include "base/cuda.h"
#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/stages/cuda/kernel_list.h"

namespace epx::cuda {

// Rows of one direction, weights and sidecars, of each node; the own node's part is unused or holds its own partials.
class RailRows {
public:
  explicit RailRows(const MultiNodeShape& shape);

  const RailArea& area() const { return area_; }

private:
  RailArea area_{};
  DeviceMemory<std::byte> memory_;
};

struct RailBuffers {
  explicit RailBuffers(const MultiNodeShape& shape);

  MultiNodePrepareBuffers prepare() const;

  DeviceMemory<MultiNodeState> state;
  MappedMemory<MultiNodeProgress> progress;
  DeviceMemory<HandleHeader> leg_headers;
  DeviceMemory<int32_t> sent_records, received_records;
  PinnedMemory<int32_t> records_on_host; // [2, N, record_words]: sent, then received
  DeviceMemory<int32_t> block_counts;    // of prepare
  DeviceMemory<int32_t> counts;          // of prepare: [1 + P, count_words]: this rank's, and then those of all ranks
  DeviceMemory<MultiNodePrepareTotals> totals;
  DeviceMemory<int32_t> token_ends;
  DeviceMemory<int32_t> sent_tables, received_tables;
  RailRows to_rails, from_rails;

private:
  int64_t count_words_;
};

} // namespace epx::cuda
