// SPDX-License-Identifier: Apache-2.0
// Random calls of the grouped FFN on CUDA, forward and backward, and how their results are compared.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/moe/ffn_run.h"

namespace epx::test {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Of which shapes a random case is: of any, or of those whose rows tensor cores can take, with zones of some hundreds of rows.
enum class CaseShapes { any, tensor_cores };

// One random call, forward and backward. T is the dtype of rows and parameters, G that of the gradients of parameters.
template <typename T, typename G>
struct FfnCase {
  explicit FfnCase(uint64_t seed, CaseShapes shapes = CaseShapes::any) : rng(mix(seed, 0xffc)) {
    const bool is_large = shapes == CaseShapes::tensor_cores;
    shape.activation = rng.pick({EPX_MOE_SWIGLU, EPX_MOE_GELU, EPX_MOE_RELU2});
    shape.num_experts = static_cast<int32_t>(is_large ? rng.between(1, 12) : rng.between(0, 5));
    shape.hidden = is_large ? rng.pick<int32_t>({64, 72, 128, 200, 256, 512}) : rng.pick<int32_t>({1, 7, 8, 24, 67, 130});
    shape.ffn = is_large ? rng.pick<int32_t>({64, 88, 128, 264, 512}) : rng.pick<int32_t>({1, 5, 16, 40, 65});
    form = {rng.chance(50), rng.chance(50), rng.chance(60), rng.chance(60), rng.chance(60)};
    is_early = rng.chance(50);
    accumulate = std::is_same_v<G, float> && rng.chance(50);
    std::vector<int32_t> counts;
    const int64_t only = is_large && rng.chance(25) ? rng.below(shape.num_experts) : -1; // has all rows
    for (int e = 0; e < shape.num_experts; ++e) {
      const auto count =
          is_large ? rng.pick<int32_t>({0, 0, 1, 63, 64, 65, 129, 300}) : rng.pick<int32_t>({0, 1, 3, 17, 64, 70});
      counts.push_back(only < 0 ? count : e == only ? 777 : 0);
    }
    fill(counts, rng.pick<int32_t>({1, 4, 16}), rng.between(0, 3));
  }

  // Makes zones of so many rows, and everything random.
  void fill(const std::vector<int32_t>& counts, int32_t alignment, int64_t spare) {
    shape.num_experts = static_cast<int32_t>(counts.size());
    zones = make_zones(counts, alignment, spare);
    params = converted_params<T>(random_weights());
    recv_tokens = random_tensor<T>({zones.num_rows, shape.hidden}, rng);
    grad_out = random_tensor<T>({zones.num_rows, shape.hidden}, rng);
    weights = random_tensor<float>({zones.num_rows}, rng);
    fill_unused(zones, recv_tokens, T(kNaN)); // is neither multiplied nor read into a result
    fill_unused(zones, grad_out, T(kNaN));
    fill_unused(zones, weights, static_cast<float>(kNaN));
    first_grads = converted_params<G>(random_params<double>(shape, form, rng));
  }

  // Returns parameters whose products are of order 1 however long the rows are, where the activations are not straight lines.
  FfnParams<double> random_weights() {
    FfnParams<double> random = random_params<double>(shape, form, rng);
    for_each_tensor(
        [](const char*, Tensor<double>& tensor) {
          for (int64_t i = 0; i < tensor.count() && tensor.ndim() == 3 && tensor.size(2) >= 64; ++i)
            tensor[i] *= 4 / std::sqrt(static_cast<double>(tensor.size(2)));
        },
        random);
    return random;
  }

  int64_t pre_act_size() const { return shape.gated() ? 2 * shape.ffn : shape.ffn; }

  Rng rng;
  FfnShape shape;
  FfnForm form;
  bool is_early = false, accumulate = false;
  Zones zones;
  FfnParams<T> params;
  Tensor<T> recv_tokens, grad_out;
  Tensor<float> weights;
  FfnParams<G> first_grads; // what gradients are added to
};

template <typename T, typename G>
struct Result {
  explicit Result(const FfnCase<T, G>& c)
      : expert_out(scribbled<T>({c.zones.num_rows, c.shape.hidden})),
        pre_act(scribbled<T>({c.zones.num_rows, c.pre_act_size()})),
        grad_recv(scribbled<T>({c.zones.num_rows, c.shape.hidden})), grad_weights(scribbled<float>({c.zones.num_rows})),
        grads(c.accumulate ? c.first_grads : scribbled_like(c.first_grads)) {}

  Tensor<T> expert_out, pre_act, grad_recv;
  Tensor<float> grad_weights;
  FfnParams<G> grads;
};

// The arguments of a case's calls but for `cuda`. They point into the case and the result.
template <typename T, typename G>
struct FfnCalls {
  FfnCalls(const FfnCase<T, G>& c, Result<T, G>& result)
      : config(ffn_config(c.shape)), params(c.params.view()), grads(result.grads.view()) {
    fwd.struct_size = sizeof(fwd);
    fwd.params = &params;
    fwd.recv_tokens = c.recv_tokens.get();
    fwd.counts = c.zones.counts.get();
    fwd.offsets = c.zones.offsets.get();
    fwd.recv_weights = c.is_early ? c.weights.get() : nullptr;
    fwd.expert_out = result.expert_out.get();
    fwd.pre_act = result.pre_act.get();
    bwd.struct_size = sizeof(bwd);
    bwd.params = &params;
    bwd.recv_tokens = fwd.recv_tokens;
    bwd.counts = fwd.counts;
    bwd.offsets = fwd.offsets;
    bwd.recv_weights = fwd.recv_weights;
    bwd.pre_act = result.pre_act.get();
    bwd.grad_expert_out = c.grad_out.get();
    bwd.grad_recv = result.grad_recv.get();
    bwd.grad_recv_weights = c.is_early ? result.grad_weights.get() : nullptr;
    bwd.grads = &grads;
    bwd.accumulate = c.accumulate ? 1 : 0;
  }
  FfnCalls(const FfnCalls&) = delete;
  FfnCalls& operator=(const FfnCalls&) = delete;

  epx_moe_ffn_config config;
  epx_moe_ffn_params params, grads;
  epx_moe_ffn_args fwd{};
  epx_moe_ffn_bwd_args bwd{};
};

template <typename T, typename G>
Result<T, G> run_on_cuda(const FfnCase<T, G>& c, int num_sms) {
  Result<T, G> result(c);
  FfnCalls<T, G> calls(c, result);
  const auto on_sms = [&](const epx_moe_cuda* place) {
    epx_moe_cuda limited = *place;
    limited.num_sms = num_sms;
    return limited;
  };
  const epx_moe_cuda fwd_place = on_sms(place_of_call(epx_moe_ffn_workspace, &calls.config, &calls.fwd));
  calls.fwd.cuda = &fwd_place;
  require_ok(epx_moe_ffn(&calls.config, &calls.fwd), "epx_moe_ffn");
  finish_call();
  const epx_moe_cuda bwd_place = on_sms(place_of_call(epx_moe_ffn_bwd_workspace, &calls.config, &calls.bwd));
  calls.bwd.cuda = &bwd_place;
  require_ok(epx_moe_ffn_bwd(&calls.config, &calls.bwd), "epx_moe_ffn_bwd");
  finish_call();
  return result;
}

// Rows in use are near the expected ones, and the others still hold what they held before. The terms of an element's sum may
// cancel, but their rounding errors do not, and in a tensor of few elements that may be so in all: `sum` is of the order that
// the elements have otherwise.
template <typename T>
std::string rows_fault(const char* name, const Zones& zones, Tensor<T> actual, const Tensor<double>& expected,
                       double tolerance, double sum = 1) {
  const Tensor<T> before = scribbled<T>({actual.size(0), actual.ndim() == 2 ? actual.size(1) : 1});
  for (int64_t row = 0; row < zones.num_rows; ++row)
    for (int64_t i = 0; i < actual.per_row() && !zones.used(row); ++i)
      if (std::memcmp(&actual(row, i), &before(row, i), sizeof(T)) != 0) return std::string(name) + ": a pad was written";
  Tensor<double> wide = expected;
  fill_unused(zones, actual, T{});
  fill_unused(zones, wide, 0.0);
  constexpr int64_t kFew = 16;
  const int64_t elements = std::accumulate(zones.counts.begin(), zones.counts.end(), int64_t{0}) * actual.per_row();
  const double scale = std::max(max_abs(wide), elements < kFew ? sum : 0.0);
  const std::string wrong = difference(converted<double>(actual), wide, tolerance, scale);
  return wrong.empty() ? "" : std::string(name) + ": " + wrong;
}

// Returns how the results differ from the host's in float64.
template <typename T, typename G>
std::string result_fault(const FfnCase<T, G>& c, const Result<T, G>& result, double tolerance) {
  const OnHost host;
  const FfnParams<double> params = converted_params<double>(c.params);
  Tensor<double> recv_tokens = converted<double>(c.recv_tokens);
  Tensor<double> grad_out = converted<double>(c.grad_out);
  const Tensor<double> weights = converted<double>(c.weights);
  const auto forward = run_ffn(c.shape, params, c.zones, recv_tokens, c.is_early ? &weights : nullptr);
  FfnParams<double> grads = converted_params<double>(c.first_grads);
  const auto backward = run_ffn_bwd(c.shape, params, c.zones, recv_tokens, c.is_early ? &weights : nullptr, forward.pre_act,
                                    grad_out, &grads, c.accumulate);
  std::string wrong = rows_fault("expert_out", c.zones, result.expert_out, forward.expert_out, tolerance) +
                      rows_fault("pre_act", c.zones, result.pre_act, forward.pre_act, tolerance) +
                      rows_fault("grad_recv", c.zones, result.grad_recv, backward.recv, tolerance);
  if (c.is_early)
    wrong += rows_fault("grad_recv_weights", c.zones, result.grad_weights, backward.recv_weights, tolerance,
                        std::sqrt(c.shape.hidden));
  // These are sums over the rows: their terms, of order 1, may cancel, but the rounding errors of the terms do not.
  const double noise = std::sqrt(static_cast<double>(c.zones.num_rows));
  const FfnParams<double> actual_grads = converted_params<double>(result.grads);
  for_each_tensor(
      [&](const char* name, const Tensor<double>& actual, const Tensor<double>& expected) {
        const std::string fault = difference(actual, expected, tolerance, std::max(noise, max_abs(expected)));
        if (!fault.empty()) wrong += std::string(" ") + name + ": " + fault;
      },
      actual_grads, grads);
  return wrong;
}

// Returns what is wrong with one random case.
template <typename T, typename G>
std::string ffn_fault(uint64_t seed, double tolerance, CaseShapes shapes = CaseShapes::any) {
  const FfnCase<T, G> c(seed, shapes);
  return result_fault(c, run_on_cuda(c, 0), tolerance);
}

// Returns which results differ in any bit.
template <typename T, typename G>
std::string bits_fault(const Result<T, G>& actual, const Result<T, G>& expected) {
  std::string wrong;
  const auto compare = [&](const char* name, const auto& a, const auto& b) {
    if (const std::string fault = difference(a, b); !fault.empty()) wrong += std::string(" ") + name + ": " + fault;
  };
  compare("expert_out", actual.expert_out, expected.expert_out);
  compare("pre_act", actual.pre_act, expected.pre_act);
  compare("grad_recv", actual.grad_recv, expected.grad_recv);
  compare("grad_recv_weights", actual.grad_weights, expected.grad_weights);
  for_each_tensor(compare, actual.grads, expected.grads);
  return wrong;
}

} // namespace epx::test
