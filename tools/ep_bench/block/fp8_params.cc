// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/fp8_params.h"

namespace epx::bench {

BlockFp8Params::BlockFp8Params(const BlockData& data, Memory& memory) : calls_(memory) {
  constexpr int64_t kBlock = 128; // rows and columns of a weight that have a scale in common
  const ConstTensor gate_up = data.params().gate_up_weight, down = data.params().down_weight;
  const int64_t experts = gate_up.size(0), stacked = gate_up.size(1), hidden = gate_up.size(2), ffn = down.size(2);
  const auto take = [&](epx_dtype dtype, int64_t rows, int64_t columns) {
    const int64_t bytes = epx::row_bytes(dtype, experts * rows * columns);
    buffers_.push_back(Buffer::plain(memory, static_cast<size_t>(bytes)));
    return Tensor(buffers_.back().data(), dtype, {experts, rows, columns});
  };
  const auto codes = [&](int64_t rows, int64_t columns) { return take(EPX_FLOAT8_E4M3, rows, columns); };
  const auto scales = [&](int64_t rows, int64_t columns) { return take(EPX_FLOAT32, rows / kBlock, columns / kBlock); };
  args_ = {.format = RowFormat(EPX_SCALING_BLOCK128),
           .gate_up_weight = gate_up,
           .down_weight = down,
           .fp8_params = {.gate_up_codes = codes(stacked, hidden),
                          .gate_up_scales = scales(stacked, hidden),
                          .down_codes = codes(hidden, ffn),
                          .down_scales = scales(hidden, ffn),
                          .gate_up_transposed_codes = codes(hidden, stacked),
                          .gate_up_transposed_scales = scales(hidden, stacked),
                          .down_transposed_codes = codes(ffn, hidden),
                          .down_transposed_scales = scales(ffn, hidden)}};
}

void BlockFp8Params::quantise() {
  calls_.run(args_, [](const auto& args) { moe::quantise_params(args); });
}

} // namespace epx::bench
