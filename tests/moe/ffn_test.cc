// SPDX-License-Identifier: Apache-2.0
// These tests compare the grouped FFN forward with three plain loops in double, and check what it must not touch and that a row
// does not depend on the others.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/ffn_run.h"

namespace epx::test {
namespace {

constexpr epx_moe_activation kActivations[] = {EPX_MOE_SWIGLU, EPX_MOE_GELU, EPX_MOE_RELU2};

// Linear is one linear layer, with the place of its output features in tensors that may be stacked.
struct Linear {
  const std::optional<Tensor<double>>& weight;
  int64_t first_weight;
  const std::optional<Tensor<double>>& bias;
  int64_t first_bias;

  double operator()(int64_t expert, int64_t out, const std::vector<double>& in) const {
    double sum = bias ? (*bias)(expert, first_bias + out) : 0;
    const auto width = static_cast<int64_t>(in.size());
    for (int64_t i = 0; i < width; ++i)
      sum += (*weight)(expert, (first_weight + out) * width + i) * in[static_cast<size_t>(i)];
    return sum;
  }
};

struct Naive {
  Tensor<double> expert_out;
  Tensor<double> pre_act;
};

Naive naive_ffn(const FfnShape& shape, const FfnParams<double>& p, const Zones& zones, const Tensor<double>& recv,
                const Tensor<double>* recv_weights) {
  const Linear gate = {p.gate_up_weight ? p.gate_up_weight : p.gate_weight, 0,
                       p.gate_up_bias ? p.gate_up_bias : p.gate_bias, 0};
  const Linear up = {p.gate_up_weight ? p.gate_up_weight : p.up_weight, p.gate_up_weight ? shape.ffn : 0,
                     p.gate_up_bias ? p.gate_up_bias : p.up_bias, p.gate_up_bias ? shape.ffn : 0};
  const Linear down = {p.down_weight, 0, p.down_bias, 0};
  Naive naive = {Tensor<double>({zones.num_rows, shape.hidden}),
                 Tensor<double>({zones.num_rows, shape.gated() ? 2 * shape.ffn : shape.ffn})};
  for (int64_t row = 0; row < zones.num_rows; ++row) {
    if (!zones.used(row)) continue;
    const int64_t expert = zones.row_expert[static_cast<size_t>(row)];
    std::vector<double> x;
    for (int64_t h = 0; h < shape.hidden; ++h)
      x.push_back(recv(row, h));
    std::vector<double> hidden;
    for (int64_t f = 0; f < shape.ffn; ++f) {
      const double u = up(expert, f, x);
      if (shape.gated()) {
        const double g = gate(expert, f, x);
        naive.pre_act(row, f) = g;
        naive.pre_act(row, shape.ffn + f) = u;
        hidden.push_back(g / (1 + std::exp(-g)) * u);
      } else {
        naive.pre_act(row, f) = u;
        const double relu = std::max(u, 0.0);
        hidden.push_back(shape.activation == EPX_MOE_GELU ? u * 0.5 * (1 + std::erf(u / std::sqrt(2.0))) : relu * relu);
      }
    }
    for (int64_t h = 0; h < shape.hidden; ++h)
      naive.expert_out(row, h) = (recv_weights != nullptr ? (*recv_weights)[row] : 1) * down(expert, h, hidden);
  }
  return naive;
}

FfnParams<double> widened(const FfnParams<float>& params) {
  FfnParams<double> wide;
  for (size_t i = 0; i < params.kNames.size(); ++i) {
    const auto& tensor = params.*params.kNames[i].tensor;
    if (tensor) wide.*wide.kNames[i].tensor = converted<double>(*tensor);
  }
  return wide;
}
const FfnParams<double>& widened(const FfnParams<double>& params) {
  return params;
}

// Rows in use are near the expected ones; the others still hold what scribble() wrote.
template <typename Real>
std::string rows_fault(const Zones& zones, const Tensor<Real>& actual, const Tensor<double>& expected) {
  Tensor<Real> used = actual;
  fill_unused(zones, used, Real{0});
  const std::string wrong =
      difference(converted<double>(used), expected, sizeof(Real) == 8 ? 1e-13 : 2e-6, max_abs(expected));
  if (!wrong.empty()) return wrong;
  Tensor<Real> kept = scribbled<Real>({actual.size(0), actual.size(1)});
  for (int64_t row = 0; row < zones.num_rows; ++row) {
    for (int64_t i = 0; i < actual.size(1) && zones.used(row); ++i)
      kept(row, i) = actual(row, i);
  }
  const std::string touched = difference(actual, kept);
  return touched.empty() ? "" : "a row that is not in use was written: " + touched;
}

// Rows that are not in use hold NaN.
template <typename Real>
Tensor<Real> random_rows_of(const Zones& zones, int64_t width, Rng& rng) {
  auto rows = random_tensor<Real>({zones.num_rows, width}, rng);
  fill_unused(zones, rows, std::numeric_limits<Real>::quiet_NaN());
  return rows;
}

template <typename Real>
std::string forward_fault(const FfnShape& shape, const FfnForm& form, bool weighted) {
  Rng rng(mix(static_cast<uint64_t>(shape.activation), 41));
  const Zones zones = make_zones({3, 0, 5, 1}, 4, 2);
  const auto params = random_params<Real>(shape, form, rng);
  const auto recv = random_rows_of<Real>(zones, shape.hidden, rng);
  auto recv_weights = random_tensor<Real>({zones.num_rows}, rng, -2, 2);
  fill_unused(zones, recv_weights, std::numeric_limits<Real>::quiet_NaN());

  const auto* weights = weighted ? &recv_weights : nullptr;
  const auto wide_weights = converted<double>(recv_weights);
  const Naive expected =
      naive_ffn(shape, widened(params), zones, converted<double>(recv), weighted ? &wide_weights : nullptr);
  const auto result = run_ffn(shape, params, zones, recv, weights);
  std::string wrong = rows_fault(zones, result.expert_out, expected.expert_out);
  if (wrong.empty()) wrong = rows_fault(zones, result.pre_act, expected.pre_act);
  if (wrong.empty()) wrong = difference(run_ffn(shape, params, zones, recv, weights, false).expert_out, result.expert_out);
  return wrong;
}

TEST_CASE("the FFN in every form of its parameters") {
  for (const epx_moe_activation activation : kActivations) {
    const FfnShape shape = {4, 7, 5, activation};
    for (int bits = 0; bits < 64; ++bits) {
      const FfnForm form = {(bits & 8) != 0, (bits & 16) != 0, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
      const bool weighted = (bits & 32) != 0;
      CAPTURE(activation);
      CAPTURE(bits);
      CHECK(forward_fault<double>(shape, form, weighted) == "");
    }
    CHECK(forward_fault<float>(shape, {}, true) == "");
    CHECK(forward_fault<float>({4, 33, 65, activation}, {true, true}, false) == "");
    CHECK(forward_fault<double>({4, 128, 33, activation}, kNoBias, false) == "");
  }
}

TEST_CASE("stacked and separate parameters have the same bits") {
  Rng rng(42);
  const FfnShape shape = {2, 33, 17, EPX_MOE_SWIGLU};
  const Zones zones = make_zones({9, 4}, 1, 0);
  const auto recv = random_rows_of<float>(zones, shape.hidden, rng);
  const auto run = [&](bool stacked_weight, bool stacked_bias) {
    Rng same(43);
    return run_ffn(shape, random_params<float>(shape, {stacked_weight, stacked_bias}, same), zones, recv);
  };
  const auto separate = run(false, false);
  for (const auto& other : {run(true, true), run(true, false), run(false, true)}) {
    CHECK(difference(other.expert_out, separate.expert_out) == "");
    CHECK(difference(other.pre_act, separate.pre_act) == "");
  }
}

TEST_CASE("early weighting has the results of late weighting, down_bias included") {
  Rng rng(44);
  for (const epx_moe_activation activation : kActivations) {
    CAPTURE(activation);
    const FfnShape shape = {2, 33, 9, activation};
    const Zones zones = make_zones({4, 3}, 4, 1);
    const auto params = random_params<float>(shape, {}, rng);
    const auto recv = random_rows_of<float>(zones, shape.hidden, rng);
    const auto recv_weights = random_tensor<float>({zones.num_rows}, rng, 0, 1);
    auto late = run_ffn(shape, params, zones, recv).expert_out;
    auto early = run_ffn(shape, params, zones, recv, &recv_weights).expert_out;
    fill_unused(zones, late, 0.0f);
    fill_unused(zones, early, 0.0f);
    for (int64_t row = 0; row < zones.num_rows; ++row) {
      for (int64_t h = 0; h < shape.hidden; ++h)
        late(row, h) *= recv_weights[row];
    }
    CHECK(difference(early, late, 1e-5, max_abs(converted<double>(late))) == "");
  }
}

struct RowResults {
  Tensor<float> expert_out, pre_act, grad_recv, grad_recv_weights;
};

// Runs rows of `recv`, in the order given, through the one expert of `shape`.
RowResults run_rows(const FfnShape& shape, const FfnParams<float>& params, const Tensor<float>& recv,
                    const Tensor<float>& recv_weights, const Tensor<float>& grad_out, const std::vector<int64_t>& order) {
  const auto num_rows = static_cast<int64_t>(order.size());
  Tensor<float> rows({num_rows, shape.hidden}), weights({num_rows}), grads({num_rows, shape.hidden});
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t from = order[static_cast<size_t>(i)];
    weights[i] = recv_weights[from];
    for (int64_t h = 0; h < shape.hidden; ++h) {
      rows(i, h) = recv(from, h);
      grads(i, h) = grad_out(from, h);
    }
  }
  const Zones zones = make_zones({static_cast<int32_t>(num_rows)}, 1, 0);
  const auto result = run_ffn(shape, params, zones, rows, &weights);
  const auto gradients = run_ffn_bwd<float>(shape, params, zones, rows, &weights, result.pre_act, grads, nullptr);
  return {result.expert_out, result.pre_act, gradients.recv, gradients.recv_weights};
}

std::string row_difference(const RowResults& a, int64_t row_of_a, const RowResults& b, int64_t row_of_b) {
  const auto compare = [&](const Tensor<float> RowResults::*tensor) {
    return difference(slice_rows(a.*tensor, row_of_a, 1), slice_rows(b.*tensor, row_of_b, 1));
  };
  std::string wrong = compare(&RowResults::expert_out) + compare(&RowResults::pre_act) + compare(&RowResults::grad_recv);
  if (a.grad_recv_weights[row_of_a] != b.grad_recv_weights[row_of_b]) wrong += "grad_recv_weights differ";
  return wrong;
}

TEST_CASE("a row has the same bits alone, elsewhere, and next to NaNs") {
  constexpr int64_t kRows = 19;
  constexpr int64_t kNanRow = kRows;
  std::vector<int64_t> all(kRows);
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int64_t> reversed(all.rbegin(), all.rend());
  for (const auto& dims : {std::pair{7, 33}, std::pair{33, 7}, std::pair{65, 128}, std::pair{128, 65}}) {
    const int hidden = dims.first, ffn = dims.second;
    for (const epx_moe_activation activation : kActivations) {
      CAPTURE(hidden);
      CAPTURE(ffn);
      CAPTURE(activation);
      Rng rng(45);
      const FfnShape shape = {1, hidden, ffn, activation};
      const auto params = random_params<float>(shape, {true, true}, rng);
      auto recv = random_tensor<float>({kRows + 1, hidden}, rng);
      const auto recv_weights = random_tensor<float>({kRows + 1}, rng);
      const auto grad_out = random_tensor<float>({kRows + 1, hidden}, rng);
      for (int64_t h = 0; h < hidden; ++h)
        recv(kNanRow, h) = std::numeric_limits<float>::quiet_NaN();
      const auto run = [&](const std::vector<int64_t>& order) {
        return run_rows(shape, params, recv, recv_weights, grad_out, order);
      };
      const RowResults expected = run(all);
      const RowResults backwards = run(reversed);
      for (const int64_t row : {0, 5, 18}) {
        CAPTURE(row);
        CHECK(row_difference(run({row}), 0, expected, row) == "");
        CHECK(row_difference(run({1, row, 2}), 1, expected, row) == "");
        CHECK(row_difference(run({kNanRow, row, kNanRow, kNanRow, kNanRow}), 1, expected, row) == "");
        CHECK(row_difference(backwards, kRows - 1 - row, expected, row) == "");
      }
    }
  }
}

TEST_CASE("no experts, and experts without rows") {
  Rng rng(46);
  for (const epx_moe_activation activation : kActivations) {
    CAPTURE(activation);
    const FfnShape none = {0, 5, 3, activation};
    for (const int64_t num_rows : {0, 3}) {
      const Zones zones = make_zones({}, 4, num_rows);
      const auto result = run_ffn(none, random_params<float>(none, {}, rng), zones, Tensor<float>({num_rows, 5}));
      CHECK(difference(result.expert_out, scribbled<float>({num_rows, 5})) == "");
    }
    const FfnShape idle = {3, 5, 3, activation};
    const Zones zones = make_zones({0, 0, 0}, 4, 2);
    const auto result = run_ffn(idle, random_params<float>(idle, {}, rng), zones, Tensor<float>({2, 5}));
    CHECK(difference(result.expert_out, scribbled<float>({2, 5})) == "");
  }
}

TEST_CASE("counts of INT64") {
  Rng rng(47);
  const FfnShape shape = {2, 3, 2, EPX_MOE_RELU2};
  const auto params = random_params<double>(shape, {}, rng);
  const Zones zones = make_zones({2, 1}, 2, 0);
  const auto recv = random_tensor<double>({zones.num_rows, 3}, rng);
  const auto counts = converted<int64_t>(zones.counts);
  const auto offsets = converted<int64_t>(zones.offsets);
  auto expert_out = scribbled<double>({zones.num_rows, 3});
  const epx_moe_ffn_config config = ffn_config(shape);
  const epx_moe_ffn_params view = params.view();
  const epx_moe_ffn_args args = {sizeof(args), nullptr,          &view,  recv.get(), counts.get(), offsets.get(),
                                 nullptr,      expert_out.get(), nullptr};
  require_ok(epx_moe_ffn(&config, &args), "epx_moe_ffn");
  CHECK(difference(expert_out, run_ffn(shape, params, zones, recv).expert_out) == "");
}

TEST_CASE("the defaults of an FFN") {
  epx_moe_ffn_config config;
  std::memset(&config, 0xA5, sizeof(config));
  REQUIRE(epx_moe_ffn_config_init(&config, sizeof(config)) == EPX_SUCCESS);
  CHECK(config.struct_size == sizeof(config));
  CHECK(config.num_local_experts == 0);
  CHECK(config.hidden_dim == 0);
  CHECK(config.ffn_dim == 0);
  CHECK(config.activation == EPX_MOE_SWIGLU);
  CHECK(epx_moe_ffn_config_init(nullptr, sizeof(config)) == EPX_ERROR_INVALID_ARGUMENT);
}

} // namespace
} // namespace epx::test
