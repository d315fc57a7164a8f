// SPDX-License-Identifier: Apache-2.0
// SwiGLU and its backward, quantised: their numbers by a plain loop, and the codes and scales of these by the oracle.
#include <string>

#include <doctest/doctest.h>

#include "tests/moe/quantise_swiglu_run.h"

namespace epx::test {
namespace {

// On CUDA scales of powers of two may differ by a factor of 2, where an amax is next to a power.
QuantiseFormat swiglu_format(Rng& rng) {
  QuantiseFormat format = random_format(rng);
  while (on_cuda() && format.scaling != EPX_SCALING_BLOCK128)
    format = random_format(rng);
  return format;
}

QuantisedRows expected_of(const QuantiseFormat& format, const Tensor<float>& values, const Zones& zones, Wanted wanted) {
  return expected_rows(format, matrix_of(values, EPX_FLOAT32, values.size(0), values.size(1)), &zones, wanted);
}

TEST_CASE("random rows: w * SwiGLU is quantised from float32") {
  for (uint64_t seed = 0; seed < num_cases(50); ++seed) {
    Rng rng(mix(seed, 0x51));
    const QuantiseFormat format = swiglu_format(rng);
    const Zones zones = random_quantise_zones(rng);
    const auto inner = rng.pick<int64_t>({128, 128, 384});
    const SwigluInput input = random_swiglu_input(zones, inner, rng.chance(50), rng.pick({0, 0, 5}), rng);
    const auto wanted = rng.pick({Wanted::rows, Wanted::columns, Wanted::both});
    const SwigluOutputs outputs = run_swiglu(format, input, zones, wanted);
    const std::string wrong =
        swiglu_difference(outputs.h, expected_of(format, swiglu_values(input).h, zones, wanted), format);
    if (!wrong.empty()) FAIL_CHECK("seed " << seed << ": " << wrong);
  }
}

TEST_CASE("random rows: the backward of w * SwiGLU is quantised from float32, whatever else is wanted") {
  for (uint64_t seed = 0; seed < num_cases(50); ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x52));
    QuantiseFormat format = swiglu_format(rng);
    format.amax_floor = rng.pick<float>({0.0f, 1e-4f});
    const Zones zones = random_quantise_zones(rng);
    const auto inner = rng.pick<int64_t>({128, 128, 384});
    const bool has_weights = rng.chance(60);
    const int percent_special = rng.pick({0, 0, 5});
    const SwigluInput input = random_swiglu_input(zones, inner, has_weights, percent_special, rng);
    WantedGradients wanted = {rng.pick<std::optional<Wanted>>({Wanted::rows, Wanted::columns, Wanted::both, {}}),
                              rng.chance(60), has_weights && rng.chance(60)};
    if (!wanted.pre_act && !wanted.recv_weights) wanted.h = true;
    const SwigluOutputs outputs = run_swiglu_bwd(format, input, zones, wanted);
    const SwigluValues values = swiglu_values(input);
    const SwigluOutputs nothing(format, zones, inner);
    const QuantisedRows grads = wanted.pre_act ? expected_of(format, values.grads, zones, *wanted.pre_act) : nothing.grads;
    CHECK(swiglu_difference(outputs.grads, grads, format) == "");
    const QuantisedRows h = wanted.h ? expected_of(format, values.h, zones, Wanted::columns) : nothing.h;
    CHECK(swiglu_difference(outputs.h, h, format) == "");
    for (int64_t row = 0; row < zones.num_rows && percent_special == 0; ++row) {
      const float actual = outputs.grad_recv_weights[row];
      if (wanted.recv_weights && zones.used(row))
        CHECK(std::abs(actual - values.weight_grads[row]) < 1e-10); // of terms of 1e-5
      else
        CHECK(actual == nothing.grad_recv_weights[row]);
    }
  }
}

TEST_CASE("SwiGLU in a closed form") {
  const Zones zones = make_zones({1}, 1, 0);
  SwigluInput input = {128, Tensor<Bfloat16>({1, 256}, Bfloat16(1)), Tensor<Bfloat16>({1, 128}, Bfloat16(0)),
                       Tensor<float>({1}, 0.5f)};
  input.pre_act(0, 0) = Bfloat16(128); // its sigmoid is 1
  input.pre_act(0, 128) = Bfloat16(7);
  input.pre_act(0, 1) = Bfloat16(-200); // 0
  input.grad_h(0, 0) = Bfloat16(4);
  const QuantiseFormat format = {EPX_SCALING_BLOCK128, 0, EPX_FLOAT32, EPX_SCALES_ROWS};
  const SwigluOutputs forward = run_swiglu(format, input, zones, Wanted::both);
  CHECK(forward.h.row_codes(0, 0) == 0x7e); // 0.5 * 128 * 7 = 448
  CHECK(forward.h.row_codes(0, 1) == 0x80);
  CHECK(forward.h.column_codes(0, 0) == 0x7e);
  CHECK(forward.h.column_scales(0, 0) == 1);
  const SwigluOutputs backward = run_swiglu_bwd(format, input, zones, {});
  CHECK(backward.h.column_scales(0, 0) == 1);
  CHECK(backward.grad_recv_weights[0] == 4 * 128 * 7);
  CHECK(backward.grads.column_scales(0, 0) == 14.0f / 448);    // 0.5 * 4 * 7
  CHECK(backward.grads.column_scales(0, 128) == 256.0f / 448); // 0.5 * 4 * 128
  CHECK(backward.grads.row_codes(0, 0) == 0x7e);
  CHECK(backward.grads.row_codes(0, 128) == 0x7e); // a block of its own
}

TEST_CASE("SwiGLU's backward makes the columns that its forward made, and bits depend on no number of SMs") {
  Rng rng(501);
  const Zones zones = make_zones({130, 0, 60}, 16, 3);
  const SwigluInput input = random_swiglu_input(zones, 256, true, 0, rng);
  const QuantiseFormat format = random_format(rng);
  const SwigluOutputs forward = run_swiglu(format, input, zones, Wanted::columns, 1);
  const SwigluOutputs backward = run_swiglu_bwd(format, input, zones, {}, 1);
  CHECK(backward.h.difference_to(forward.h) == "");
  const SwigluOutputs on_all = run_swiglu_bwd(format, input, zones, {});
  CHECK(on_all.h.difference_to(forward.h) == "");
  CHECK(on_all.grads.difference_to(backward.grads) == "");
  CHECK(difference(on_all.grad_recv_weights, backward.grad_recv_weights) == "");
}

TEST_CASE("SwiGLU of no zones writes nothing") {
  Rng rng(502);
  const Zones zones = make_zones({0, 0}, 1, 5);
  const SwigluInput input = random_swiglu_input(zones, 128, true, 0, rng);
  const QuantiseFormat format;
  const SwigluOutputs nothing(format, zones, 128);
  CHECK(run_swiglu(format, input, zones, Wanted::both).h.difference_to(nothing.h) == "");
  const SwigluOutputs backward = run_swiglu_bwd(format, input, zones, {});
  CHECK(backward.h.difference_to(nothing.h) == "");
  CHECK(backward.grads.difference_to(nothing.grads) == "");
  CHECK(difference(backward.grad_recv_weights, nothing.grad_recv_weights) == "");
}

} // namespace
} // namespace epx::test
