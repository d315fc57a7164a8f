// SPDX-License-Identifier: Apache-2.0
// Compares epx_moe_ffn_fp8_bwd with finite differences of the function that it differentiates: the FFN in float64 of the
// dequantised tokens and weights, without quantisers between the products, since gradients pass straight through these.
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/ffn_fp8_run.h"

namespace epx::test {
namespace {

// The scalar is the dot product of expert_out and `cotangent`: a sum over rows and over the F units of the row's expert.
struct StraightThrough {
  Zones zones;
  Wide tokens, gate_up, down, cotangent;
  Tensor<double> recv_weights; // [N]

  double value_of_row(int64_t row) const {
    double value = 0;
    for (int64_t f = 0; f < down.size(2); ++f)
      value += value_at(row, f);
    return value;
  }
  double value_of_unit(int64_t e, int64_t f) const {
    double value = 0;
    for (int64_t row = zones.offsets[e]; row < zones.offsets[e] + zones.counts[e]; ++row)
      value += value_at(row, f);
    return value;
  }

private:
  double value_at(int64_t row, int64_t f) const {
    const int64_t e = zones.row_expert[static_cast<size_t>(row)], hidden = tokens.size(1), ffn = down.size(2);
    const double *const of_gate = &gate_up(e, f * hidden), *const of_up = &gate_up(e, (ffn + f) * hidden);
    const double *const of_down = &down(e, f), *const x = &tokens(row, 0), *const y = &cotangent(row, 0);
    double gate = 0, up = 0, grad = 0;
    for (int64_t i = 0; i < hidden; ++i) {
      gate += of_gate[i] * x[i];
      up += of_up[i] * x[i];
      grad += of_down[i * ffn] * y[i];
    }
    return recv_weights[row] * gate / (1 + std::exp(-gate)) * up * grad;
  }
};

struct Fp8GradientCase {
  FfnShape shape;
  Zones zones;
  ReceivedRows tokens, grad_expert_out;
  Fp8Params params;
  Tensor<float> recv_weights;
  bool weighted;

  StraightThrough function() const {
    const auto in_float32 = [](const Wide& wide) { return converted<double>(converted<float>(wide)); }; // as on the host
    StraightThrough made = {zones,
                            dequantised(tokens),
                            in_float32(dequantised(params.gate_up_codes, params.gate_up_scales)),
                            in_float32(dequantised(params.down_codes, params.down_scales)),
                            dequantised(grad_expert_out),
                            Tensor<double>({zones.num_rows}, 1.0)};
    if (weighted) made.recv_weights = converted<double>(recv_weights);
    return made;
  }
};

// Central differences of some elements of a tensor.
struct Differences {
  std::vector<std::pair<int64_t, double>> elements; // which, and its difference

  // `value` reads `x`.
  void add(Tensor<double>& x, int64_t i, double step, const std::function<double()>& value) {
    const double at = x[i];
    x[i] = at + step;
    const double above = value();
    x[i] = at - step;
    const double below = value();
    x[i] = at;
    elements.emplace_back(i, (above - below) / (2 * step));
  }
  // The norm of the gradient's error, relative to that of the differences.
  double error_of(const Tensor<float>& gradient) const {
    double error = 0, norm = 0;
    for (const auto& [i, expected] : elements) {
      error += std::pow(static_cast<double>(gradient[i]) - expected, 2);
      norm += std::pow(expected, 2);
    }
    return std::sqrt(error / norm);
  }
};

// A small part of the largest element.
double step_of(const Zones& zones, const Tensor<double>& rows) {
  double largest = 0;
  for (int64_t row = 0; row < zones.num_rows; ++row)
    for (int64_t i = 0; i < rows.per_row() && zones.used(row); ++i)
      largest = std::max(largest, std::abs(rows(row, i)));
  return 1e-4 * largest;
}

// Elements of all rows, and of all blocks of 128 units.
struct AllDifferences {
  Differences recv, recv_weights, gate_up, down;

  AllDifferences(const Fp8GradientCase& c, Rng& rng) {
    StraightThrough f = c.function();
    const double tokens_step = step_of(c.zones, f.tokens), weights_step = step_of(c.zones, f.recv_weights);
    for (int64_t row = 0; row < c.zones.num_rows; ++row) {
      if (!c.zones.used(row)) continue;
      const auto value = [&] { return f.value_of_row(row); };
      for (int64_t block = 0; block < c.shape.hidden; block += 128)
        for (int sample = 0; sample < 2; ++sample)
          recv.add(f.tokens, row * c.shape.hidden + block + rng.below(128), tokens_step, value);
      recv_weights.add(f.recv_weights, row, weights_step, value);
    }
    for (int64_t e = 0; e < c.shape.num_experts; ++e)
      for (int64_t block = 0; block < c.shape.ffn && c.zones.counts[e] > 0; block += 128)
        for (int sample = 0; sample < 128; ++sample)
          add_unit(c, f, e, block + rng.below(128), sample % 4 > 0, rng);
  }

private:
  // One element of each of the unit's weights: with `is_not_zero` one that a row multiplies by something else than 0.
  void add_unit(const Fp8GradientCase& c, StraightThrough& f, int64_t e, int64_t unit, bool is_not_zero, Rng& rng) {
    const int64_t hidden = c.shape.hidden, ffn = c.shape.ffn, row = c.zones.offsets[e] + rng.below(c.zones.counts[e]);
    const auto column_of = [&](const Wide& rows) {
      int64_t column = rng.below(hidden);
      while (is_not_zero && rows(row, column) == 0)
        column = (column + 1) % hidden;
      return column;
    };
    const auto value = [&] { return f.value_of_unit(e, unit); };
    for (const int64_t stacked : {unit, ffn + unit})
      gate_up.add(f.gate_up, (e * 2 * ffn + stacked) * hidden + column_of(f.tokens), 1e-4, value);
    down.add(f.down, (e * hidden + column_of(f.cotangent)) * ffn + unit, 1e-4, value);
  }
};

// The largest errors that are allowed.
struct Fp8GradientLimits {
  double recv, recv_weights, gate_up, down;
};

void check_fp8_gradients(const Fp8GradientCase& c, epx_moe_recipe recipe, const AllDifferences& differences,
                         const Fp8GradientLimits& limits) {
  CAPTURE(static_cast<int>(recipe));
  const Tensor<float>* const recv_weights = c.weighted ? &c.recv_weights : nullptr;
  const Tensor<float> pre_act = run_ffn_fp8<float>(c.shape, c.params, c.zones, c.tokens, recv_weights).pre_act;
  FfnParams<float> grads;
  grads.gate_up_weight = scribbled<float>({c.shape.num_experts, 2 * c.shape.ffn, c.shape.hidden});
  grads.down_weight = scribbled<float>({c.shape.num_experts, c.shape.hidden, c.shape.ffn});
  const Fp8Gradients<float> rows = run_ffn_fp8_bwd<float>(recipe, c.shape, c.params, c.zones, c.tokens, recv_weights,
                                                          pre_act, c.grad_expert_out, &grads);
  CHECK(differences.recv.error_of(rows.recv) <= limits.recv);
  if (c.weighted) CHECK(differences.recv_weights.error_of(rows.recv_weights) <= limits.recv_weights);
  CHECK(differences.gate_up.error_of(*grads.gate_up_weight) <= limits.gate_up);
  CHECK(differences.down.error_of(*grads.down_weight) <= limits.down);
  double without_rows = 0;
  for (const auto* const grad : {&*grads.gate_up_weight, &*grads.down_weight})
    for (int64_t e = 0; e < c.shape.num_experts; ++e)
      for (int64_t i = 0; i < grad->per_row() && c.zones.counts[e] == 0; ++i)
        without_rows += std::abs((*grad)(e, i));
  CHECK(without_rows == 0);
}

struct ShapeAndCounts {
  FfnShape shape;
  std::vector<int32_t> counts;
};
// Experts without rows, and one that has all of them, in two blocks of 128.
const std::vector<ShapeAndCounts>& gradient_shapes() {
  static const std::vector<ShapeAndCounts> shapes = {{{1, 128, 128, EPX_MOE_SWIGLU}, {20}},
                                                     {{3, 256, 128, EPX_MOE_SWIGLU}, {17, 0, 40}},
                                                     {{3, 128, 256, EPX_MOE_SWIGLU}, {0, 150, 0}},
                                                     {{2, 256, 256, EPX_MOE_SWIGLU}, {33, 16}}};
  return shapes;
}

double power_of_two(Rng& rng, int lowest, int highest) {
  return std::ldexp(rng.chance(50) ? 1 : -1, static_cast<int>(rng.between(lowest, highest)));
}

// Powers of two, with another largest one in each block.
Tensor<float> weight_of_powers(int64_t experts, int64_t rows, int64_t columns, Rng& rng) {
  Tensor<float> weight({experts, rows, columns});
  std::vector<int> of_block(static_cast<size_t>(experts * rows / 128 * columns / 128));
  for (int& exponent : of_block)
    exponent = static_cast<int>(rng.between(-1, 0));
  for (int64_t i = 0; i < weight.count(); ++i) {
    const int64_t block = i / columns / 128 * (columns / 128) + i % columns / 128;
    weight[i] = static_cast<float>(std::ldexp(power_of_two(rng, -2, 0), of_block[static_cast<size_t>(block)]));
  }
  return weight;
}

// Rows of one element, 1 to 4 times 2^exponent, positive or not.
ReceivedRows rows_of_one(const Zones& zones, int64_t hidden, int exponent, bool is_signed, Rng& rng) {
  ReceivedRows rows = {Tensor<E4m3>({zones.num_rows, hidden}), Tensor<float>({zones.num_rows, hidden / 128})};
  for (int64_t i = 0; i < rows.scales.count(); ++i)
    rows.scales[i] = static_cast<float>(std::abs(power_of_two(rng, exponent, exponent + 1)));
  constexpr uint8_t kOne = 0x38, kTwo = 0x40, kSign = 0x80;
  for (int64_t row = 0; row < zones.num_rows; ++row)
    rows.codes(row, rng.below(hidden)) =
        E4m3{static_cast<uint8_t>(rng.pick({kOne, kTwo}) | (is_signed && rng.chance(50) ? kSign : 0))};
  fill_unused(zones, rows.codes, E4m3{0x7f});
  fill_unused(zones, rows.scales, std::nanf(""));
  return rows;
}

// All numbers between the products are powers of two that E4M3 has, or 0: a row of tokens and one of gradients has one
// element, and gates are 32 or more, where silu is the identity, or -32 or less, where it is 0. So quantisers round
// nothing.
Fp8GradientCase exact_case(const ShapeAndCounts& sizes, bool weighted, Rng& rng) {
  const auto& [shape, counts] = sizes;
  const Zones zones = make_zones(counts, 16, 16);
  FfnParams<float> weights;
  weights.gate_up_weight = weight_of_powers(shape.num_experts, 2 * shape.ffn, shape.hidden, rng);
  weights.down_weight = weight_of_powers(shape.num_experts, shape.hidden, shape.ffn, rng);
  Fp8GradientCase made = {shape,
                          zones,
                          rows_of_one(zones, shape.hidden, 8, false, rng),
                          rows_of_one(zones, shape.hidden, -20, true, rng),
                          quantised_params(weights),
                          Tensor<float>({zones.num_rows}),
                          weighted};
  for (int64_t row = 0; row < zones.num_rows; ++row)
    made.recv_weights[row] = static_cast<float>(power_of_two(rng, -1, 0));
  return made;
}

Fp8GradientCase random_case(const ShapeAndCounts& sizes, bool weighted, Rng& rng) {
  const auto& [shape, counts] = sizes;
  const Zones zones = make_zones(counts, 16, 16);
  return {shape,
          zones,
          random_received_rows(zones, shape.hidden, 1, rng),
          random_received_rows(zones, shape.hidden, 1e-6, rng),
          quantised_params(random_params<float>(shape, kStacked, rng)),
          random_tensor<float>({zones.num_rows}, rng, 0.1, 1),
          weighted};
}

TEST_CASE("gradients of the FFN in FP8 by finite differences, where quantisers round nothing") {
  // The call makes no error. The differences do: a value has 53 bits, and changes by 1e-4 of itself or less. The largest
  // error is 5.1e-12.
  const Fp8GradientLimits limits = {1e-11, 1e-11, 1e-11, 1e-11};
  for (const ShapeAndCounts& sizes : gradient_shapes())
    for (const bool weighted : {false, true}) {
      CAPTURE(sizes.shape.hidden);
      CAPTURE(sizes.shape.ffn);
      CAPTURE(weighted);
      Rng rng(mix(static_cast<uint64_t>(sizes.shape.hidden + sizes.shape.ffn), weighted ? 1 : 0));
      const Fp8GradientCase c = exact_case(sizes, weighted, rng);
      const AllDifferences differences(c, rng);
      for (const epx_moe_recipe recipe : {EPX_MOE_RECIPE_FP8_ACTIVATIONS, EPX_MOE_RECIPE_FP8})
        check_fp8_gradients(c, recipe, differences, limits);
    }
}

// E4M3 has 8 numbers in [1, 2), so it rounds one of them by 1 / 16 / sqrt(3) in the mean, which is quadratic. The mean of
// what is rounded is 1.47 where magnitudes are spread evenly over orders of two, so the error of a rounding is 0.025 of it.
// That of a gradient of rows comes from the gradient of pre_act. With EPX_MOE_RECIPE_FP8 that of a weight comes from both
// operands, and is 0.035 of it. The largest errors here are 0.026 and 0.030, and 6.6e-7 where float32 alone rounds.
TEST_CASE("gradients of the FFN in FP8 by finite differences, to what E4M3 rounds") {
  constexpr double kOneRounding = 0.04, kTwoRoundings = 0.05, kFloat32 = 1.2e-6;
  for (const ShapeAndCounts& sizes : gradient_shapes())
    for (const bool weighted : {false, true}) {
      CAPTURE(sizes.shape.hidden);
      CAPTURE(sizes.shape.ffn);
      CAPTURE(weighted);
      Rng rng(mix(static_cast<uint64_t>(sizes.shape.hidden + sizes.shape.ffn), weighted ? 3 : 2));
      const Fp8GradientCase c = random_case(sizes, weighted, rng);
      const AllDifferences differences(c, rng);
      check_fp8_gradients(c, EPX_MOE_RECIPE_FP8_ACTIVATIONS, differences, {kOneRounding, kFloat32, kFloat32, kFloat32});
      check_fp8_gradients(c, EPX_MOE_RECIPE_FP8, differences, {kOneRounding, kFloat32, kTwoRoundings, kTwoRoundings});
    }
}

} // namespace
} // namespace epx::test
