// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/native/ragged_rows.h"

namespace epx::bench {

RaggedRows::RaggedRows(const Options& options, GroupView group, int64_t max_rows, size_t num_sets, Memory& memory)
    : options_(options), group_(group), memory_(memory), rank_(group.query().rank), num_ranks_(group.query().num_ranks),
      max_rows_(max_rows) {
  const auto bytes = static_cast<size_t>(max_rows * row_bytes(options));
  arrived_ = options.staged ? Buffer::plain(memory, bytes) : Buffer::window(memory, group, bytes);
  for (size_t set = 0; set < num_sets; ++set)
    integers_.push_back(Buffer::plain(memory, 4 * static_cast<size_t>(num_ranks_) * sizeof(int32_t)));
}

void RaggedRows::plan(const NativeRows& native, size_t set) {
  const auto ranks = static_cast<size_t>(num_ranks_), rank = static_cast<size_t>(rank_);
  std::vector<int32_t> integers(4 * ranks); // one slice for each rank
  int64_t input_offset = 0;
  for (size_t peer = 0; peer < ranks; ++peer) {
    const int64_t rows = native.sent_to(rank_)[peer];
    int64_t output_offset = 0; // behind the rows of the ranks before this one
    for (int before = 0; before < rank_; ++before)
      output_offset += native.sent_to(before)[peer];
    integers[peer] = static_cast<int32_t>(input_offset);
    integers[ranks + peer] = static_cast<int32_t>(rows);
    integers[2 * ranks + peer] = static_cast<int32_t>(output_offset);
    integers[3 * ranks + peer] = static_cast<int32_t>(native.sent_to(static_cast<int>(peer))[rank]);
    input_offset += rows;
  }
  integers_[set].write(integers);
}

void RaggedRows::exchange(const Buffer& sorted_rows, size_t set) const {
  const int64_t ranks = num_ranks_, hidden = options_.hidden;
  const auto integers = [&](int64_t field) {
    return ConstTensor(integers_[set].data() + field * ranks * static_cast<int64_t>(sizeof(int32_t)), EPX_INT32, {ranks});
  };
  group_.ragged_all_to_all(
      {.stream = memory_.stream(),
       .operand = ConstTensor(sorted_rows.data(), options_.dtype, {int64_t{options_.tokens} * options_.top_k, hidden}),
       .output = Tensor(arrived_.data(), options_.dtype, {max_rows_, hidden}),
       .input_offsets = integers(0),
       .send_sizes = integers(1),
       .output_offsets = integers(2),
       .recv_sizes = integers(3)});
}

} // namespace epx::bench
