// SPDX-License-Identifier: Apache-2.0
// Parameters and calls of the grouped FFN in FP8 for the tests, with scribbled outputs.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "epx/epx_moe.h"
#include "tests/moe/ffn_run.h"
#include "tests/moe/tensors.h"

namespace epx::test {

// Rows in FP8 with their scales.
struct ReceivedRows {
  Tensor<E4m3> codes;   // [N, H]
  Tensor<float> scales; // [N, H / 128]

  float operator()(int64_t row, int64_t i) const { return static_cast<float>(codes(row, i)) * scales(row, i / 128); }
};

inline E4m3 random_code(Rng& rng) {
  const auto code = static_cast<uint8_t>(rng.next() >> 40);
  return {(code & 0x7f) == 0x7f ? uint8_t{0} : code};
}

// Rows of magnitude `scale`; those that are not in use are NaN.
inline ReceivedRows random_received_rows(const Zones& zones, int64_t hidden, double scale, Rng& rng) {
  ReceivedRows rows = {Tensor<E4m3>({zones.num_rows, hidden}), Tensor<float>({zones.num_rows, hidden / 128})};
  for (int64_t i = 0; i < rows.codes.count(); ++i)
    rows.codes[i] = random_code(rng);
  for (int64_t i = 0; i < rows.scales.count(); ++i)
    rows.scales[i] = static_cast<float>(uniform(rng, 0.5, 1) * scale / 448);
  fill_unused(zones, rows.codes, E4m3{0x7f});
  fill_unused(zones, rows.scales, std::nanf(""));
  return rows;
}

// Owns the memory of an epx_moe_fp8_params.
struct Fp8Params {
  Tensor<E4m3> gate_up_codes, down_codes, gate_up_transposed_codes, down_transposed_codes;
  Tensor<float> gate_up_scales, down_scales, gate_up_transposed_scales, down_transposed_scales;

  // The result is valid as long as the members are neither moved nor replaced.
  epx_moe_fp8_params view() const {
    return {sizeof(epx_moe_fp8_params),
            gate_up_codes.get(),
            gate_up_scales.get(),
            down_codes.get(),
            down_scales.get(),
            gate_up_transposed_codes.get(),
            gate_up_transposed_scales.get(),
            down_transposed_codes.get(),
            down_transposed_scales.get()};
  }

  void scribble_transposes() {
    gate_up_transposed_codes.scribble();
    gate_up_transposed_scales.scribble();
    down_transposed_codes.scribble();
    down_transposed_scales.scribble();
  }

  std::string difference_to(const Fp8Params& expected) const {
    return difference(gate_up_codes, expected.gate_up_codes) + difference(gate_up_scales, expected.gate_up_scales) +
           difference(down_codes, expected.down_codes) + difference(down_scales, expected.down_scales) +
           difference(gate_up_transposed_codes, expected.gate_up_transposed_codes) +
           difference(gate_up_transposed_scales, expected.gate_up_transposed_scales) +
           difference(down_transposed_codes, expected.down_transposed_codes) +
           difference(down_transposed_scales, expected.down_transposed_scales);
  }
};

// Quantises stacked weights.
inline Fp8Params quantised_params(const FfnParams<float>& params) {
  const Tensor<float>&gate_up = *params.gate_up_weight, &down = *params.down_weight;
  const int64_t experts = down.size(0), hidden = down.size(1), ffn = down.size(2), stacked = 2 * ffn;
  const auto codes = [&](int64_t rows, int64_t columns) { return scribbled<E4m3>({experts, rows, columns}); };
  const auto scales = [&](int64_t rows, int64_t columns) { return scribbled<float>({experts, rows / 128, columns / 128}); };
  Fp8Params fp8 = {.gate_up_codes = codes(stacked, hidden),
                   .down_codes = codes(hidden, ffn),
                   .gate_up_transposed_codes = codes(hidden, stacked),
                   .down_transposed_codes = codes(ffn, hidden),
                   .gate_up_scales = scales(stacked, hidden),
                   .down_scales = scales(hidden, ffn),
                   .gate_up_transposed_scales = scales(hidden, stacked),
                   .down_transposed_scales = scales(ffn, hidden)};
  const epx_row_format format = format_of(EPX_SCALING_BLOCK128);
  const epx_moe_fp8_params view = fp8.view();
  const epx_moe_quantise_params_args args = {sizeof(args), place_of_call(), &format, gate_up.get(), down.get(), &view};
  require_ok(epx_moe_quantise_params(&args), "epx_moe_quantise_params");
  finish_call();
  return fp8;
}

// A matrix of rows or of experts' weights, in float64.
using Wide = Tensor<double>;

inline Wide dequantised(const ReceivedRows& rows) {
  Wide wide({rows.codes.size(0), rows.codes.size(1)});
  for (int64_t row = 0; row < wide.size(0); ++row)
    for (int64_t i = 0; i < wide.size(1); ++i)
      wide(row, i) = rows(row, i);
  return wide;
}

inline Wide dequantised(const Tensor<E4m3>& codes, const Tensor<float>& scales) { // weights
  const int64_t n = codes.size(1), k = codes.size(2);
  Wide wide({codes.size(0), n, k});
  for (int64_t e = 0; e < codes.size(0); ++e)
    for (int64_t i = 0; i < n * k; ++i)
      wide(e, i) = static_cast<double>(codes(e, i)) * scales(e, i / k / 128 * (k / 128) + i % k / 128);
  return wide;
}

inline constexpr FfnForm kStacked = {true, true, false, false, false};

// T is what is wide: float on the host, Bfloat16 on CUDA.
template <typename T>
FfnResult<T> run_ffn_fp8(const FfnShape& shape, const Fp8Params& params, const Zones& zones, const ReceivedRows& tokens,
                         const Tensor<float>* recv_weights, bool want_pre_act = true) {
  FfnResult<T> result = {scribbled<T>({zones.num_rows, shape.hidden}), scribbled<T>({zones.num_rows, 2 * shape.ffn})};
  const epx_moe_ffn_config config = ffn_config(shape);
  const epx_moe_fp8_params view = params.view();
  epx_moe_ffn_fp8_args args = {};
  args.struct_size = sizeof(args);
  args.params = &view;
  args.recv_tokens = tokens.codes.get();
  args.recv_scales = tokens.scales.get();
  args.counts = zones.counts.get();
  args.offsets = zones.offsets.get();
  args.recv_weights = recv_weights != nullptr ? recv_weights->get() : nullptr;
  args.expert_out = result.expert_out.get();
  args.pre_act = want_pre_act ? result.pre_act.get() : nullptr;
  args.cuda = place_of_call(epx_moe_ffn_fp8_workspace, &config, &args);
  require_ok(epx_moe_ffn_fp8(&config, &args), "epx_moe_ffn_fp8");
  finish_call();
  return result;
}

template <typename T>
struct Fp8Gradients {
  Tensor<T> recv;             // [N, H]
  Tensor<float> recv_weights; // [N]
};

// `grads`: gate_up_weight and down_weight, scribbled or with values to add to.
template <typename T>
Fp8Gradients<T> run_ffn_fp8_bwd(epx_moe_recipe recipe, const FfnShape& shape, const Fp8Params& params, const Zones& zones,
                                const ReceivedRows& tokens, const Tensor<float>* recv_weights, const Tensor<T>& pre_act,
                                const ReceivedRows& grad_expert_out, FfnParams<float>* grads, bool accumulate = false) {
  Fp8Gradients<T> result = {scribbled<T>({zones.num_rows, shape.hidden}), scribbled<float>({zones.num_rows})};
  const epx_moe_ffn_config config = ffn_config(shape);
  const epx_moe_fp8_params view = params.view();
  const epx_moe_ffn_params grads_view = grads != nullptr ? grads->view() : epx_moe_ffn_params{};
  epx_moe_ffn_fp8_bwd_args args = {};
  args.struct_size = sizeof(args);
  args.params = &view;
  args.recv_tokens = tokens.codes.get();
  args.recv_scales = tokens.scales.get();
  args.counts = zones.counts.get();
  args.offsets = zones.offsets.get();
  args.recv_weights = recv_weights != nullptr ? recv_weights->get() : nullptr;
  args.pre_act = pre_act.get();
  args.grad_expert_out = grad_expert_out.codes.get();
  args.grad_scales = grad_expert_out.scales.get();
  args.grad_recv = result.recv.get();
  args.grad_recv_weights = recv_weights != nullptr ? result.recv_weights.get() : nullptr;
  args.grads = grads != nullptr ? &grads_view : nullptr;
  args.accumulate = accumulate ? 1 : 0;
  args.recipe = recipe;
  args.cuda = place_of_call(epx_moe_ffn_fp8_bwd_workspace, &config, &args);
  require_ok(epx_moe_ffn_fp8_bwd(&config, &args), "epx_moe_ffn_fp8_bwd");
  finish_call();
  return result;
}

} // namespace epx::test
