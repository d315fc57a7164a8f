// SPDX-License-Identifier: Apache-2.0
// Calls the quantisers of SwiGLU for the tests, with scribbled outputs, and says what they are to write.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "tests/moe/quantise_run.h"

namespace epx::test {

struct SwigluInput {
  int64_t inner = 0;                         // F
  Tensor<Bfloat16> pre_act;                  // [N, 2F]
  Tensor<Bfloat16> grad_h;                   // [N, F]
  std::optional<Tensor<float>> recv_weights; // [N]
};

inline SwigluInput random_swiglu_input(const Zones& zones, int64_t inner, bool has_weights, int percent_special, Rng& rng) {
  SwigluInput input = {inner, Tensor<Bfloat16>({zones.num_rows, 2 * inner}), Tensor<Bfloat16>({zones.num_rows, inner}), {}};
  for (int64_t i = 0; i < input.pre_act.count(); ++i)
    input.pre_act[i] = Bfloat16(random_element(rng, percent_special, 2));
  for (int64_t i = 0; i < input.grad_h.count(); ++i)
    input.grad_h[i] = Bfloat16(random_element(rng, percent_special, -20));
  fill_unused(zones, input.pre_act, Bfloat16(std::nan("")));
  fill_unused(zones, input.grad_h, Bfloat16(std::nan("")));
  if (has_weights) {
    input.recv_weights = random_tensor<float>({zones.num_rows}, rng, 0, 2);
    fill_unused(zones, *input.recv_weights, std::nanf(""));
  }
  return input;
}

struct SwigluOutputs {
  QuantisedRows h;                 // [N, F]; of the backward the columns alone
  QuantisedRows grads;             // [N, 2F]
  Tensor<float> grad_recv_weights; // [N]
  SwigluOutputs(const QuantiseFormat& format, const Zones& zones, int64_t inner)
      : h(format, zones.num_rows, inner, zones.counts.count()),
        grads(format, zones.num_rows, 2 * inner, zones.counts.count()),
        grad_recv_weights(scribbled<float>({zones.num_rows})) {}
};

// The numbers that are quantised, in float32 and in the order of operations of activation.h.
struct SwigluValues {
  Tensor<float> h;             // [N, F], weighted
  Tensor<float> grads;         // [N, 2F]
  Tensor<double> weight_grads; // [N]
};
inline SwigluValues swiglu_values(const SwigluInput& input) {
  const int64_t rows = input.pre_act.size(0), inner = input.inner;
  SwigluValues values = {Tensor<float>({rows, inner}), Tensor<float>({rows, 2 * inner}), Tensor<double>({rows})};
  for (int64_t row = 0; row < rows; ++row) {
    const float weight = input.recv_weights ? (*input.recv_weights)[row] : 1.0f;
    for (int64_t f = 0; f < inner; ++f) {
      const float gate = input.pre_act(row, f), up = input.pre_act(row, inner + f), grad_h = input.grad_h(row, f);
      const float sigmoid = 1 / (1 + std::exp(-gate)), h = gate * sigmoid * up, grad = weight * grad_h;
      values.h(row, f) = weight * h;
      values.grads(row, f) = grad * up * sigmoid * (1 + gate * (1 - sigmoid));
      values.grads(row, inner + f) = grad * gate * sigmoid;
      values.weight_grads[row] += double{grad_h} * h;
    }
  }
  return values;
}

template <typename Args>
void set_input(const SwigluInput& input, const Zones& zones, Args& args) {
  args.struct_size = sizeof(args);
  args.pre_act = input.pre_act.get();
  args.recv_weights = input.recv_weights ? input.recv_weights->get() : nullptr;
  args.counts = zones.counts.get();
  args.offsets = zones.offsets.get();
}

// num_sms 0: all.
inline SwigluOutputs run_swiglu(const QuantiseFormat& how, const SwigluInput& input, const Zones& zones, Wanted wanted,
                                int num_sms = 0) {
  SwigluOutputs outputs(how, zones, input.inner);
  epx_row_format format = how.get();
  const epx_tensor row_codes = view_as(outputs.h.row_codes, EPX_FLOAT8_E4M3, {zones.num_rows, input.inner});
  const epx_tensor row_scales = scales_view(outputs.h.row_scales, how, zones.num_rows, input.inner);
  const epx_tensor column_codes = view_as(outputs.h.column_codes, EPX_FLOAT8_E4M3, {input.inner, zones.num_rows});
  epx_moe_quantise_swiglu_args args = {};
  set_input(input, zones, args);
  args.format = &format;
  if (wanted == Wanted::columns)
    format.scale_layout = EPX_SCALES_ROWS;
  else
    args.row_codes = &row_codes, args.row_scales = &row_scales;
  if (wanted != Wanted::rows) args.column_codes = &column_codes, args.column_scales = outputs.h.column_scales.get();
  args.cuda = place_of_call();
  epx_moe_cuda place = {};
  if (args.cuda != nullptr) place = *args.cuda, place.num_sms = num_sms, args.cuda = &place;
  require_ok(epx_moe_quantise_swiglu(&args), "epx_moe_quantise_swiglu");
  finish_call();
  return outputs;
}

// What a backward is to write.
struct WantedGradients {
  std::optional<Wanted> pre_act = Wanted::both;
  bool h = true;
  bool recv_weights = true;
};
inline SwigluOutputs run_swiglu_bwd(const QuantiseFormat& how, const SwigluInput& input, const Zones& zones,
                                    const WantedGradients& wanted, int num_sms = 0) {
  SwigluOutputs outputs(how, zones, input.inner);
  epx_row_format format = how.get();
  const int64_t rows = zones.num_rows, inner = input.inner;
  const epx_tensor row_codes = view_as(outputs.grads.row_codes, EPX_FLOAT8_E4M3, {rows, 2 * inner});
  const epx_tensor row_scales = scales_view(outputs.grads.row_scales, how, rows, 2 * inner);
  const epx_tensor column_codes = view_as(outputs.grads.column_codes, EPX_FLOAT8_E4M3, {2 * inner, rows});
  const epx_tensor h_codes = view_as(outputs.h.column_codes, EPX_FLOAT8_E4M3, {inner, rows});
  epx_moe_quantise_swiglu_bwd_args args = {};
  set_input(input, zones, args);
  args.format = &format;
  args.grad_h = input.grad_h.get();
  const bool wants_rows = wanted.pre_act && *wanted.pre_act != Wanted::columns;
  if (wants_rows)
    args.row_codes = &row_codes, args.row_scales = &row_scales;
  else
    format.scale_layout = EPX_SCALES_ROWS;
  if (wanted.pre_act && *wanted.pre_act != Wanted::rows)
    args.column_codes = &column_codes, args.column_scales = outputs.grads.column_scales.get();
  if (wanted.h) args.h_column_codes = &h_codes, args.h_column_scales = outputs.h.column_scales.get();
  if (wanted.recv_weights) args.grad_recv_weights = outputs.grad_recv_weights.get();
  args.cuda = place_of_call(epx_moe_quantise_swiglu_bwd_workspace, &args);
  epx_moe_cuda place = {};
  if (args.cuda != nullptr) place = *args.cuda, place.num_sms = num_sms, args.cuda = &place;
  require_ok(epx_moe_quantise_swiglu_bwd(&args), "epx_moe_quantise_swiglu_bwd");
  finish_call();
  return outputs;
}

// Compares exactly on the host. A GPU's exponential may differ in its last place: there a code may be a neighbour's now and then,
// and a scale of BLOCK128 a little off, by more than that place where 1 + gate * (1 - sigmoid) cancels.
inline std::string swiglu_difference(const QuantisedRows& actual, const QuantisedRows& expected,
                                     const QuantiseFormat& format) {
  std::string exact = actual.difference_to(expected);
  if (exact.empty() || !on_cuda() || format.scaling != EPX_SCALING_BLOCK128) return exact;
  int64_t num_neighbours = 0;
  const auto code_fault = [&](const Tensor<uint8_t>& a, const Tensor<uint8_t>& b) {
    for (int64_t i = 0; i < a.count(); ++i) {
      if (a[i] == b[i]) continue;
      if ((a[i] ^ b[i]) >= 128 || std::abs(a[i] - b[i]) > 1 || a[i] % 128 == 127 || b[i] % 128 == 127) return true;
      ++num_neighbours;
    }
    return false;
  };
  if (code_fault(actual.row_codes, expected.row_codes) || code_fault(actual.column_codes, expected.column_codes))
    return exact;
  if (num_neighbours > 2 + actual.row_codes.count() / 1000) return exact;
  constexpr double kOff = 1e-5;
  const auto row_scales = [](const QuantisedRows& rows) {
    Tensor<float> scales({rows.row_scales.count() / 4});
    for (int64_t i = 0; i < scales.count(); ++i)
      std::memcpy(&scales[i], &rows.row_scales[4 * i], 4);
    return scales;
  };
  return difference(row_scales(actual), row_scales(expected), kOff) +
         difference(actual.column_scales, expected.column_scales, kOff);
}

} // namespace epx::test
