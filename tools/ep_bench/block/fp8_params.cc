// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/fp8_params.h"

namespace epx::bench {

BlockFp8Params::BlockFp8Params(const BlockData& data, Memory& memory) : calls_(memory) {
  const ConstTensor gate_up = data.params().gate_up_weight, down = data.params().down_weight;
  const int64_t experts = down.size(0), hidden = down.size(1), ffn = down.size(2);
  const auto take = [&](epx_dtype dtype, int64_t rows, int64_t columns) {
    const int64_t bytes = epx::row_bytes(dtype, experts * rows * columns);
    buffers_.push_back(Buffer::plain(memory, static_cast<size_t>(bytes)));
    return Tensor(buffers_.back().data(), dtype, {experts, rows, columns});
  };
  args_ = {.format = RowFormat(EPX_SCALING_BLOCK128),
           .gate_up_weight = gate_up,
           .down_weight = down,
           .fp8_params = moe::fp8_tensors(hidden, ffn, take)};
}

void BlockFp8Params::quantise() {
  calls_.run(args_, [](const auto& args) { moe::quantise_params(args); });
}

} // namespace epx::bench
