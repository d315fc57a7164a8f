// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/fp8_params.h"

namespace epx::bench {

BlockFp8Params::Weight::Weight(const ConstTensor& given, Memory& memory) : weights(given) {
  constexpr int64_t kBlock = 128; // rows and columns that have a scale in common
  const int64_t experts = given.size(0), rows = given.size(1), columns = given.size(2);
  const auto take = [&](Buffer& buffer, epx_dtype dtype, int64_t r, int64_t c) {
    buffer = Buffer::plain(memory, static_cast<size_t>(epx::row_bytes(dtype, experts * r * c)));
    return Tensor(buffer.data(), dtype, {experts, r, c});
  };
  codes = take(code_bytes, EPX_FLOAT8_E4M3, rows, columns);
  scales = take(scale_bytes, EPX_FLOAT32, rows / kBlock, columns / kBlock);
  transposed_codes = take(transposed_code_bytes, EPX_FLOAT8_E4M3, columns, rows);
  transposed_scales = take(transposed_scale_bytes, EPX_FLOAT32, columns / kBlock, rows / kBlock);
}

moe::QuantiseWeightsArgs BlockFp8Params::Weight::args() const {
  return {.format = RowFormat(EPX_SCALING_BLOCK128),
          .weights = weights,
          .codes = codes,
          .scales = scales,
          .transposed_codes = transposed_codes,
          .transposed_scales = transposed_scales};
}

BlockFp8Params::BlockFp8Params(const BlockData& data, Memory& memory)
    : calls_(memory), gate_up_(data.params().gate_up_weight, memory), down_(data.params().down_weight, memory) {}

void BlockFp8Params::quantise() {
  for (const Weight* const weight : {&gate_up_, &down_})
    calls_.run(weight->args(), [](const auto& args) { moe::quantise_weights(args); });
}

moe::Fp8Params BlockFp8Params::params() const {
  return {.gate_up_codes = gate_up_.codes,
          .gate_up_scales = gate_up_.scales,
          .down_codes = down_.codes,
          .down_scales = down_.scales,
          .gate_up_transposed_codes = gate_up_.transposed_codes,
          .gate_up_transposed_scales = gate_up_.transposed_scales,
          .down_transposed_codes = down_.transposed_codes,
          .down_transposed_scales = down_.transposed_scales};
}

} // namespace epx::bench
