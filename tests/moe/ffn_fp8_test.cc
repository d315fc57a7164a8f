// SPDX-License-Identifier: Apache-2.0
// The grouped FFN in FP8 beside float64. What lies between the products is quantised
// here by the oracle of row formats, from what the call itself has written, so that a product's error is not taken for
// another's.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/ffn_fp8_run.h"
#include "tests/moe/quantise_run.h"

namespace epx::test {
namespace {

constexpr QuantiseFormat kInnerFormat = {EPX_SCALING_BLOCK128, 0.0f, EPX_FLOAT32, EPX_SCALES_ROWS};

// What a quantiser makes of rows, dequantised: along rows, or along the columns of zones.
struct Quantised {
  Wide rows, columns;
};
Quantised quantised(const Tensor<float>& values, const Zones& zones) {
  const int64_t columns = values.size(1);
  const QuantisedRows made = expected_rows(kInnerFormat, matrix_of(values, EPX_FLOAT32, zones.num_rows, columns), &zones);
  Quantised result = {Wide({zones.num_rows, columns}), Wide({zones.num_rows, columns})};
  for (int64_t row = 0; row < zones.num_rows; ++row) {
    if (!zones.used(row)) continue;
    const int64_t e = zones.row_expert[static_cast<size_t>(row)], first = zones.offsets[e];
    const int64_t block = first / 128 + e + (row - first) / 128;
    for (int64_t i = 0; i < columns; ++i) {
      float scale;
      const int64_t place = (row * (columns / 128) + i / 128) * static_cast<int64_t>(sizeof(float));
      std::memcpy(&scale, &made.row_scales[place], sizeof(scale));
      result.rows(row, i) = static_cast<double>(E4m3{made.row_codes(row, i)}) * scale;
      result.columns(row, i) = static_cast<double>(E4m3{made.column_codes(i, row)}) * made.column_scales(block, i);
    }
  }
  return result;
}

// a [N, k] * b [E, n, k]^T
Wide product(const Zones& zones, const Wide& a, const Wide& b) {
  const int64_t n = b.size(1), k = b.size(2);
  Wide d({zones.num_rows, n});
  for (int64_t row = 0; row < zones.num_rows; ++row)
    for (int64_t j = 0; j < n && zones.used(row); ++j) {
      const double* const x = &a(row, 0);
      const double* const weight = &b(zones.row_expert[static_cast<size_t>(row)], j * k);
      double sum = 0;
      for (int64_t i = 0; i < k; ++i)
        sum += x[i] * weight[i];
      d(row, j) = sum;
    }
  return d;
}

// [E, m, n] of a [N, m] and b [N, n]
Wide gradient(const Zones& zones, const Wide& a, const Wide& b) {
  const int64_t m = a.size(1), n = b.size(1);
  Wide d({zones.counts.count(), m, n});
  for (int64_t row = 0; row < zones.num_rows; ++row)
    for (int64_t i = 0; i < m && zones.used(row); ++i) {
      double* const sums = &d(zones.row_expert[static_cast<size_t>(row)], i * n);
      const double* const y = &b(row, 0);
      const double x = a(row, i);
      for (int64_t j = 0; j < n; ++j)
        sums[j] += x * y[j];
    }
  return d;
}

// The norm of the error relative to that of what is expected; infinite where a row that is not in use was written.
template <typename T>
double error_of_rows(const Zones& zones, const Tensor<T>& actual, const Wide& expected) {
  const T untouched = scribbled<T>({1})[0];
  double error = 0, norm = 0;
  for (int64_t row = 0; row < zones.num_rows; ++row)
    for (int64_t i = 0; i < expected.per_row(); ++i) {
      if (!zones.used(row) && std::memcmp(&actual(row, i), &untouched, sizeof(T)) != 0) return INFINITY;
      if (!zones.used(row)) continue;
      error += std::pow(static_cast<double>(actual(row, i)) - expected(row, i), 2);
      norm += std::pow(expected(row, i), 2);
    }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

// T is what is wide.
template <typename T>
struct Case {
  explicit Case(uint64_t seed) : rng(seed) {
    std::vector<int32_t> counts;
    for (int e = 0; e < shape.num_experts; ++e)
      counts.push_back(rng.pick<int32_t>({0, 1, 15, 16, 40, 130}));
    alignment = rng.pick<int32_t>({16, 16, 1});
    zones = make_zones(counts, alignment, rng.pick<int64_t>({0, 16}));
    if (const int64_t odd = zones.num_rows % 16; odd > 0) zones = make_zones(counts, alignment, 16 - odd);
    tokens = random_received_rows(zones, shape.hidden, 1, rng);
    grad_expert_out = random_received_rows(zones, shape.hidden, 1e-6, rng);
    params = quantised_params(random_params<float>(shape, kStacked, rng));
    if (rng.chance(70)) {
      weights = random_tensor<float>({zones.num_rows}, rng, 0.1, 1);
      fill_unused(zones, *weights, std::nanf(""));
    }
  }
  const Tensor<float>* recv_weights() const { return weights ? &*weights : nullptr; }
  float weight(int64_t row) const { return weights ? (*weights)[row] : 1.0f; }

  FfnResult<T> forward(bool want_pre_act = true) const {
    return run_ffn_fp8<T>(shape, params, zones, tokens, recv_weights(), want_pre_act);
  }
  Fp8Gradients<T> backward(epx_moe_recipe recipe, const Tensor<T>& pre_act, FfnParams<float>* grads,
                           bool accumulate = false) const {
    return run_ffn_fp8_bwd<T>(recipe, shape, params, zones, tokens, recv_weights(), pre_act, grad_expert_out, grads,
                              accumulate);
  }
  FfnParams<float> scribbled_grads() const {
    FfnParams<float> grads;
    grads.gate_up_weight = scribbled<float>({shape.num_experts, 2 * shape.ffn, shape.hidden});
    grads.down_weight = scribbled<float>({shape.num_experts, shape.hidden, shape.ffn});
    return grads;
  }

  // w * h, and its gradients from those of h, in float32.
  struct Inner {
    Tensor<float> h, grads;
    Wide weights; // [N, 1]
  };
  Inner inner(const Tensor<T>& pre_act, const Wide* grad_h) const {
    const int64_t f = shape.ffn;
    Inner made = {Tensor<float>({zones.num_rows, f}), Tensor<float>({zones.num_rows, 2 * f}), Wide({zones.num_rows, 1})};
    for (int64_t row = 0; row < zones.num_rows; ++row)
      for (int64_t i = 0; i < f && zones.used(row); ++i) {
        const float gate = pre_act(row, i), up = pre_act(row, f + i), sigmoid = 1 / (1 + std::exp(-gate));
        const float h = gate * sigmoid * up;
        made.h(row, i) = weight(row) * h;
        if (grad_h == nullptr) continue;
        const auto of_h = static_cast<float>(static_cast<T>((*grad_h)(row, i))), grad = weight(row) * of_h;
        made.grads(row, i) = grad * up * sigmoid * (1 + gate * (1 - sigmoid));
        made.grads(row, f + i) = grad * gate * sigmoid;
        made.weights(row, 0) += double{of_h} * h;
      }
    return made;
  }

  Rng rng;
  int32_t alignment = 16; // products of columns need 16
  FfnShape shape = {static_cast<int32_t>(rng.between(1, 2)), 128 * static_cast<int32_t>(rng.between(1, 2)),
                    128 * static_cast<int32_t>(rng.between(1, 2)), EPX_MOE_SWIGLU};
  Zones zones;
  ReceivedRows tokens, grad_expert_out;
  Fp8Params params;
  std::optional<Tensor<float>> weights;
};

// Each row of a tensor as the wide type has it.
template <typename T>
Tensor<float> rounded(const Tensor<float>& values) {
  return converted<float>(converted<T>(values));
}

template <typename T>
void check_backward(const Case<T>& c, epx_moe_recipe recipe, const Tensor<T>& pre_act, double tolerance) {
  CAPTURE(static_cast<int>(recipe));
  FfnParams<float> grads = c.scribbled_grads();
  const Fp8Gradients<T> actual = c.backward(recipe, pre_act, &grads);

  const Wide grad_out = dequantised(c.grad_expert_out), tokens = dequantised(c.tokens);
  const Wide grad_h =
      product(c.zones, grad_out, dequantised(c.params.down_transposed_codes, c.params.down_transposed_scales));
  const auto inner = c.inner(pre_act, &grad_h);
  const bool is_fp8 = recipe == EPX_MOE_RECIPE_FP8;
  const Tensor<float> grad_pre_act = is_fp8 ? inner.grads : rounded<T>(inner.grads);
  const Quantised grads_of_pre_act = quantised(grad_pre_act, c.zones);
  CHECK(error_of_rows(c.zones, actual.recv,
                      product(c.zones, grads_of_pre_act.rows,
                              dequantised(c.params.gate_up_transposed_codes, c.params.gate_up_transposed_scales))) <=
        tolerance);
  if (c.weights)
    CHECK(error_of_rows(c.zones, actual.recv_weights, inner.weights) <= tolerance);
  else
    CHECK(difference(actual.recv_weights, scribbled<float>({c.zones.num_rows})) == "");

  const Wide h = is_fp8 ? quantised(inner.h, c.zones).columns : converted<double>(rounded<T>(inner.h));
  const Wide pre_act_operand = is_fp8 ? grads_of_pre_act.columns : converted<double>(grad_pre_act);
  const auto outer = [&](const Wide& rows) { return is_fp8 ? quantised(converted<float>(rows), c.zones).columns : rows; };
  CHECK(relative_error(*grads.gate_up_weight, gradient(c.zones, pre_act_operand, outer(tokens))) <= tolerance);
  CHECK(relative_error(*grads.down_weight, gradient(c.zones, outer(grad_out), h)) <= tolerance);

  // Sums, and subsets.
  FfnParams<float> sums = c.scribbled_grads();
  for (auto* tensor : {&*sums.gate_up_weight, &*sums.down_weight})
    for (int64_t i = 0; i < tensor->count(); ++i)
      (*tensor)[i] = 1.0f;
  const auto plus_one = [](const Tensor<float>& grad) {
    Wide sum = converted<double>(grad);
    for (int64_t i = 0; i < sum.count(); ++i)
      sum[i] += 1;
    return sum;
  };
  c.backward(recipe, pre_act, &sums, true);
  CHECK(difference(converted<double>(*sums.gate_up_weight), plus_one(*grads.gate_up_weight), 1e-6) == "");
  CHECK(difference(converted<double>(*sums.down_weight), plus_one(*grads.down_weight), 1e-6) == "");
  FfnParams<float> down_alone = c.scribbled_grads();
  down_alone.gate_up_weight.reset();
  c.backward(recipe, pre_act, &down_alone);
  CHECK(difference(*down_alone.down_weight, *grads.down_weight) == "");
  CHECK(difference(c.backward(recipe, pre_act, nullptr).recv, actual.recv) == "");
}

template <typename T>
void check_case(uint64_t seed) {
  CAPTURE(seed);
  const Case<T> c(seed);
  const bool on_gpu = sizeof(T) == 2;
  const double of_product = on_gpu ? 3e-3 : 2e-6;   // BFLOAT16 rounds by 2^-9 at most
  const double of_quantised = on_gpu ? 1e-2 : 1e-3; // where a number between two codes falls to the other side
  const FfnResult<T> result = c.forward();
  const Wide pre_act =
      product(c.zones, dequantised(c.tokens), dequantised(c.params.gate_up_codes, c.params.gate_up_scales));
  CHECK(error_of_rows(c.zones, result.pre_act, pre_act) <= of_product);
  const Wide h = quantised(c.inner(result.pre_act, nullptr).h, c.zones).rows;
  CHECK(error_of_rows(c.zones, result.expert_out,
                      product(c.zones, h, dequantised(c.params.down_codes, c.params.down_scales))) <= of_quantised);
  CHECK(difference(c.forward(false).expert_out, result.expert_out) == "");
  if (c.alignment == 16) check_backward(c, EPX_MOE_RECIPE_FP8, result.pre_act, of_quantised);
  check_backward(c, EPX_MOE_RECIPE_FP8_ACTIVATIONS, result.pre_act, of_quantised);
}

TEST_CASE("the grouped FFN in FP8 multiplies what it has quantised, forward and backward") {
  for (uint64_t seed = 0; seed < num_cases(12); ++seed) {
    if (on_cuda())
      check_case<Bfloat16>(seed);
    else
      check_case<float>(seed);
  }
}

template <typename T>
void check_rows_alone() {
  const Case<T> c(1001);
  REQUIRE(c.alignment == 16);
  const FfnResult<T> all = c.forward();
  // The same rows of each expert, in zones that begin elsewhere.
  Case<T> moved(1001);
  std::vector<int32_t> counts;
  for (const int32_t count : c.zones.counts)
    counts.push_back(count);
  moved.zones = make_zones(counts, 64, 32);
  const auto move = [&](const auto& from, auto to) {
    for (int64_t e = 0; e < c.shape.num_experts; ++e)
      for (int64_t row = 0; row < counts[static_cast<size_t>(e)]; ++row)
        for (int64_t i = 0; i < from.per_row(); ++i)
          to(moved.zones.offsets[e] + row, i) = from(c.zones.offsets[e] + row, i);
    return to;
  };
  const int64_t rows = moved.zones.num_rows, hidden = c.shape.hidden;
  moved.tokens = {move(c.tokens.codes, Tensor<E4m3>({rows, hidden})),
                  move(c.tokens.scales, Tensor<float>({rows, hidden / 128}))};
  moved.grad_expert_out = {move(c.grad_expert_out.codes, Tensor<E4m3>({rows, hidden})),
                           move(c.grad_expert_out.scales, Tensor<float>({rows, hidden / 128}))};
  if (c.weights) moved.weights = move(*c.weights, Tensor<float>({rows}));
  const FfnResult<T> result = moved.forward();
  CHECK(difference(result.expert_out, move(all.expert_out, scribbled<T>({rows, hidden}))) == "");
  for (const epx_moe_recipe recipe : {EPX_MOE_RECIPE_FP8_ACTIVATIONS, EPX_MOE_RECIPE_FP8}) {
    FfnParams<float> grads = c.scribbled_grads(), moved_grads = c.scribbled_grads();
    const Fp8Gradients<T> expected = c.backward(recipe, all.pre_act, &grads);
    const Fp8Gradients<T> actual = moved.backward(recipe, result.pre_act, &moved_grads);
    CHECK(difference(actual.recv, move(expected.recv, scribbled<T>({rows, hidden}))) == "");
    CHECK(difference(*moved_grads.gate_up_weight, *grads.gate_up_weight) == "");
    CHECK(difference(*moved_grads.down_weight, *grads.down_weight) == "");
  }
}

TEST_CASE("the grouped FFN in FP8 has the same bits wherever zones begin") {
  if (on_cuda())
    check_rows_alone<Bfloat16>();
  else
    check_rows_alone<float>();
}

} // namespace
} // namespace epx::test
