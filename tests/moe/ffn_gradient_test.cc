// SPDX-License-Identifier: Apache-2.0
// These tests compare epx_moe_ffn_bwd with finite differences, and check what it may write.
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/ffn_run.h"

namespace epx::test {
namespace {

constexpr epx_moe_activation kActivations[] = {EPX_MOE_SWIGLU, EPX_MOE_GELU, EPX_MOE_RELU2};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Three experts, the second without rows, in zones of 4 rows; one row follows them.
struct FfnProblem {
  FfnProblem(const FfnShape& ffn_shape, const FfnForm& form, int32_t alignment = 4)
      : shape(ffn_shape), zones(make_zones({3, 0, 2}, alignment, 1)), params(random_params<double>(shape, form, rng)) {
    // In the order of the rows in use, so that problems of other alignments have the same ones.
    for (int64_t row = 0; row < zones.num_rows; ++row) {
      if (!zones.used(row)) continue;
      recv_weights[row] = uniform(rng);
      for (int64_t h = 0; h < shape.hidden; ++h) {
        recv(row, h) = uniform(rng);
        cotangent(row, h) = uniform(rng);
      }
    }
  }

  FfnResult<double> forward() const { return run_ffn(shape, params, zones, recv, weighted ? &recv_weights : nullptr); }
  FfnGradients<double> backward(FfnParams<double>* grads, bool accumulate = false) const {
    return run_ffn_bwd(shape, params, zones, recv, weighted ? &recv_weights : nullptr, forward().pre_act, cotangent, grads,
                       accumulate);
  }

  Rng rng{51};
  FfnShape shape;
  Zones zones;
  FfnParams<double> params;
  Tensor<double> recv{{zones.num_rows, shape.hidden}};
  Tensor<double> recv_weights = Tensor<double>({zones.num_rows});
  Tensor<double> cotangent{{zones.num_rows, shape.hidden}}; // 0 in rows that are not in use
  bool weighted = true;
};

FfnShape small(epx_moe_activation activation) {
  return {3, 5, 4, activation};
}

void check_ffn_gradients(FfnProblem& problem, const std::string& what) {
  FfnParams<double> grads = scribbled_like(problem.params);
  const FfnGradients<double> rows = problem.backward(&grads);
  const auto value = [&] { return dot(problem.forward().expert_out, problem.cotangent); };
  check_gradient(value, problem.recv, rows.recv, what + ": recv_tokens");
  if (problem.weighted) check_gradient(value, problem.recv_weights, rows.recv_weights, what + ": recv_weights");
  for_each_tensor([&](const char* name, Tensor<double>& param,
                      const Tensor<double>& grad) { check_gradient(value, param, grad, what + ": " + name); },
                  problem.params, grads);
}

TEST_CASE("gradients of the FFN by finite differences") {
  for (const epx_moe_activation activation : kActivations) {
    for (const bool weighted : {false, true}) {
      for (const FfnForm& form : {FfnForm{}, FfnForm{true, true}, kNoBias}) {
        FfnProblem problem(small(activation), form);
        problem.weighted = weighted;
        check_ffn_gradients(problem, "activation " + std::to_string(activation) + (weighted ? ", early" : ""));
      }
    }
    FfnProblem only_down(small(activation), {false, false, false, false, true});
    check_ffn_gradients(only_down, "down_bias alone");
  }
  FfnProblem mixed(small(EPX_MOE_SWIGLU), {true, false});
  check_ffn_gradients(mixed, "stacked weight, separate biases");
}

TEST_CASE("pad rows are neither read nor written by the backward") {
  for (const epx_moe_activation activation : kActivations) {
    CAPTURE(activation);
    FfnProblem problem(small(activation), {});
    FfnParams<double> clean = scribbled_like(problem.params);
    const auto expected = problem.backward(&clean);

    auto pre_act = problem.forward().pre_act;
    fill_unused(problem.zones, pre_act, kNaN);
    fill_unused(problem.zones, problem.recv, kNaN);
    fill_unused(problem.zones, problem.recv_weights, kNaN);
    fill_unused(problem.zones, problem.cotangent, kNaN);
    FfnParams<double> grads = scribbled_like(problem.params);
    const auto rows = run_ffn_bwd(problem.shape, problem.params, problem.zones, problem.recv, &problem.recv_weights,
                                  pre_act, problem.cotangent, &grads);
    CHECK(difference(rows.recv, expected.recv) == "");
    CHECK(difference(rows.recv_weights, expected.recv_weights) == "");
    for_each_tensor([](const char* name, const Tensor<double>& grad,
                       const Tensor<double>& other) { CHECK_MESSAGE(difference(grad, other) == "", name); },
                    grads, clean);

    auto kept = rows.recv;
    fill_unused(problem.zones, kept, scribbled<double>({1})[0]);
    CHECK(difference(rows.recv, kept) == "");
    kept = rows.recv_weights;
    fill_unused(problem.zones, kept, scribbled<double>({1})[0]);
    CHECK(difference(rows.recv_weights, kept) == "");
  }
}

TEST_CASE("gradients of parameters do not depend on the alignment") {
  FfnProblem tight(small(EPX_MOE_SWIGLU), {}, 1);
  FfnProblem wide(small(EPX_MOE_SWIGLU), {}, 16);
  FfnParams<double> expected = scribbled_like(tight.params);
  FfnParams<double> grads = scribbled_like(wide.params);
  tight.backward(&expected);
  wide.backward(&grads);
  for_each_tensor([](const char* name, const Tensor<double>& grad,
                     const Tensor<double>& other) { CHECK_MESSAGE(difference(grad, other) == "", name); },
                  grads, expected);
}

TEST_CASE("gradients of stacked and separate parameters have the same bits") {
  FfnProblem separate(small(EPX_MOE_SWIGLU), {});
  FfnProblem stacked(small(EPX_MOE_SWIGLU), {true, true});
  FfnParams<double> expected = scribbled_like(separate.params);
  FfnParams<double> grads = scribbled_like(stacked.params);
  const auto expected_rows = separate.backward(&expected);
  const auto rows = stacked.backward(&grads);
  CHECK(difference(rows.recv, expected_rows.recv) == "");
  CHECK(difference(rows.recv_weights, expected_rows.recv_weights) == "");
  CHECK(difference(unstack(*grads.gate_up_weight, 0), *expected.gate_weight) == "");
  CHECK(difference(unstack(*grads.gate_up_weight, 1), *expected.up_weight) == "");
  CHECK(difference(unstack(*grads.gate_up_bias, 0), *expected.gate_bias) == "");
  CHECK(difference(unstack(*grads.gate_up_bias, 1), *expected.up_bias) == "");
  CHECK(difference(*grads.down_weight, *expected.down_weight) == "");
  CHECK(difference(*grads.down_bias, *expected.down_bias) == "");
}

TEST_CASE("accumulate adds, otherwise gradients are overwritten, with zero for an expert without rows") {
  for (const epx_moe_activation activation : kActivations) {
    CAPTURE(activation);
    FfnProblem problem(small(activation), {});
    FfnParams<double> fresh = scribbled_like(problem.params);
    problem.backward(&fresh);
    Rng rng(52);
    const FfnParams<double> base = random_params<double>(problem.shape, {}, rng);
    FfnParams<double> sum = base;
    problem.backward(&sum, true);
    for_each_tensor(
        [](const char* name, const Tensor<double>& grad, const Tensor<double>& start, const Tensor<double>& total) {
          CAPTURE(name);
          auto expected = start;
          for (int64_t i = 0; i < grad.count(); ++i)
            expected[i] += grad[i];
          CHECK(difference(total, expected, 1e-13, max_abs(expected)) == "");
          CHECK(max_abs(grad) > 0.01);
          for (int64_t i = 0; i < grad.per_row(); ++i) { // expert 1 has no rows
            REQUIRE(grad(1, i) == 0);
            REQUIRE(total(1, i) == start(1, i));
          }
        },
        fresh, base, sum);
  }
}

TEST_CASE("any gradient alone has the same bits as with the others") {
  for (const FfnForm& form : {FfnForm{}, FfnForm{true, true}}) {
    FfnProblem problem(small(EPX_MOE_SWIGLU), form);
    FfnParams<double> all = scribbled_like(problem.params);
    const auto expected = problem.backward(&all);
    CHECK(difference(problem.backward(nullptr).recv, expected.recv) == "");
    for (const auto& name : FfnParams<double>::kNames) {
      if (!(all.*name.tensor)) continue;
      FfnParams<double> one;
      one.*name.tensor = all.*name.tensor;
      (one.*name.tensor)->scribble();
      const auto rows = problem.backward(&one);
      CHECK_MESSAGE(difference(*(one.*name.tensor), *(all.*name.tensor)) == "", name.text);
      CHECK_MESSAGE(difference(rows.recv, expected.recv) == "", name.text);
      CHECK_MESSAGE(difference(rows.recv_weights, expected.recv_weights) == "", name.text);
    }
  }
}

TEST_CASE("gradients without experts") {
  const FfnShape none = {0, 5, 3, EPX_MOE_SWIGLU};
  Rng rng(53);
  const auto params = random_params<double>(none, {}, rng);
  FfnParams<double> grads = params;
  const Zones zones = make_zones({}, 4, 2);
  const Tensor<double> rows({2, 5});
  const auto result = run_ffn_bwd<double>(none, params, zones, rows, nullptr, Tensor<double>({2, 6}), rows, &grads);
  CHECK(difference(result.recv, scribbled<double>({2, 5})) == "");
}

} // namespace
} // namespace epx::test
