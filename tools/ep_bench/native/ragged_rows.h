// SPDX-License-Identifier: Apache-2.0
// The rows of the native way by epx_ragged_all_to_all: sorted by expert, they go to their experts' ranks, where those of the ranks
// follow each other.
#pragma once

#include <cstdint>
#include <vector>

#include "epx/epx.hpp"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/native/native_rows.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

class RaggedRows {
public:
  // Collective. `memory` and the group must outlive this. Throws epx::Error.
  RaggedRows(const Options& options, GroupView group, int64_t max_rows, size_t num_sets, Memory& memory);

  // Takes the counts of the native dispatch of a set, which has just been made.
  void plan(const NativeRows& native, size_t set);
  // Enqueues the call, by the plan of the set. Collective. Throws epx::Error.
  void exchange(const Buffer& sorted_rows, size_t set) const;

  const Buffer& arrived() const { return arrived_; } // [max_rows, H]

private:
  Options options_;
  GroupView group_;
  Memory& memory_;
  int rank_, num_ranks_;
  int64_t max_rows_;
  std::vector<Buffer> integers_; // by set: input_offsets, send_sizes, output_offsets, recv_sizes, [4, P] int32
  Buffer arrived_;
};

} // namespace epx::bench
