// SPDX-License-Identifier: Apache-2.0
// Gradients of train_moe's dense parts are compared with finite differences in float64.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "apps/train_moe/network.h"
#include "tests/support/rng.h"

namespace train {
namespace {

using Values = std::vector<double>;

Values random_values(int64_t size, epx::test::Rng& rng) {
  Values values(size);
  for (double& value : values)
    value = static_cast<double>(rng.next() >> 11) * 0x1p-52 - 1;
  return values;
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i)
    sum += a[i] * b[i];
  return sum;
}

// `x` is what `value` depends on; it is put back.
void check_gradient(const std::function<double()>& value, Values& x, const Values& gradient) {
  constexpr double kStep = 1e-5;
  double scale = 0;
  for (const double g : gradient)
    scale = std::max(scale, std::abs(g));
  REQUIRE(scale > 0);
  for (size_t i = 0; i < x.size(); ++i) {
    const double here = x[i];
    x[i] = here + kStep;
    const double above = value();
    x[i] = here - kStep;
    const double below = value();
    x[i] = here;
    CHECK(std::abs((above - below) / (2 * kStep) - gradient[i]) <= 1e-6 * scale);
  }
}

TEST_CASE("linear") {
  constexpr int64_t kRows = 3, kIn = 5, kOut = 4;
  epx::test::Rng rng(1);
  Values x = random_values(kRows * kIn, rng), weight = random_values(kOut * kIn, rng), bias = random_values(kOut, rng);
  const Values grad_y = random_values(kRows * kOut, rng);
  Values y(kRows * kOut), grad_x(x.size()), grad_weight(weight.size()), grad_bias(kOut);
  const auto value = [&] {
    linear(x.data(), weight.data(), bias.data(), kRows, kIn, kOut, y.data());
    return dot(y, grad_y);
  };
  linear_bwd(x.data(), weight.data(), grad_y.data(), kRows, kIn, kOut,
             LinearGrads<double>{grad_x.data(), grad_weight.data(), grad_bias.data()});
  check_gradient(value, x, grad_x);
  check_gradient(value, weight, grad_weight);
  check_gradient(value, bias, grad_bias);

  const Values once = grad_x;
  linear_bwd(x.data(), weight.data(), grad_y.data(), kRows, kIn, kOut,
             LinearGrads<double>{grad_x.data(), grad_weight.data(), nullptr, true});
  for (size_t i = 0; i < once.size(); ++i)
    CHECK(grad_x[i] == doctest::Approx(2 * once[i]));
}

TEST_CASE("rms_norm") {
  constexpr int64_t kRows = 3, kWidth = 7;
  epx::test::Rng rng(2);
  Values x = random_values(kRows * kWidth, rng), y(x.size()), grad_x(x.size());
  const Values grad_y = random_values(kRows * kWidth, rng);
  rms_norm_bwd(x.data(), grad_y.data(), kRows, kWidth, grad_x.data());
  const auto value = [&] {
    rms_norm(x.data(), kRows, kWidth, y.data());
    return dot(y, grad_y);
  };
  check_gradient(value, x, grad_x);
  double squares = 0;
  for (int64_t i = 0; i < kWidth; ++i)
    squares += y[i] * y[i];
  CHECK(squares / kWidth == doctest::Approx(1).epsilon(1e-4));
}

TEST_CASE("cross_entropy") {
  constexpr int64_t kRows = 3, kClasses = 6;
  const unsigned char targets[kRows] = {0, 5, 2};
  epx::test::Rng rng(3);
  Values logits = random_values(kRows * kClasses, rng);
  Values gradient = logits, losses(kRows);
  cross_entropy(gradient.data(), targets, kRows, kClasses, 0.5, losses.data());
  const auto value = [&] {
    Values copy = logits;
    cross_entropy(copy.data(), targets, kRows, kClasses, 0.5, losses.data());
    return 0.5 * std::accumulate(losses.begin(), losses.end(), 0.0);
  };
  check_gradient(value, logits, gradient);

  Values even(kClasses, 700.0); // exp(700) does not fit a float
  cross_entropy(even.data(), targets, 1, kClasses, 1.0, losses.data());
  CHECK(losses[0] == doctest::Approx(std::log(kClasses)));
}

} // namespace
} // namespace train
