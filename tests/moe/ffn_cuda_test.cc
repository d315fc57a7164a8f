// SPDX-License-Identifier: Apache-2.0
// The grouped FFN on CUDA against the host's in float64: random shapes in every dtype, bits that do not depend on the number of
// SMs, and zones of any values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/ffn_run.h"

namespace epx::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <typename To, typename From>
FfnParams<To> converted_params(const FfnParams<From>& wide) {
  FfnParams<To> params;
  for (size_t i = 0; i < wide.kNames.size(); ++i)
    if (const auto& tensor = wide.*wide.kNames[i].tensor) params.*params.kNames[i].tensor = converted<To>(*tensor);
  return params;
}

// One random call, forward and backward. T is the dtype of rows and parameters, G that of the gradients of parameters.
template <typename T, typename G>
struct FfnCase {
  explicit FfnCase(uint64_t seed) : rng(mix(seed, 0xffc)) {
    shape.activation = rng.pick({EPX_MOE_SWIGLU, EPX_MOE_GELU, EPX_MOE_RELU2});
    shape.num_experts = static_cast<int32_t>(rng.between(0, 5));
    shape.hidden = rng.pick<int32_t>({1, 7, 8, 24, 67, 130});
    shape.ffn = rng.pick<int32_t>({1, 5, 16, 40, 65});
    form = {rng.chance(50), rng.chance(50), rng.chance(60), rng.chance(60), rng.chance(60)};
    is_early = rng.chance(50);
    accumulate = std::is_same_v<G, float> && rng.chance(50);
    std::vector<int32_t> counts;
    for (int e = 0; e < shape.num_experts; ++e)
      counts.push_back(rng.pick<int32_t>({0, 1, 3, 17, 64, 70}));
    zones = make_zones(counts, rng.pick<int32_t>({1, 4, 16}), rng.between(0, 3));
    params = converted_params<T>(random_params<double>(shape, form, rng));
    recv_tokens = random_tensor<T>({zones.num_rows, shape.hidden}, rng);
    grad_out = random_tensor<T>({zones.num_rows, shape.hidden}, rng);
    weights = random_tensor<float>({zones.num_rows}, rng);
    fill_unused(zones, recv_tokens, T(kNaN)); // is neither multiplied nor read into a result
    fill_unused(zones, grad_out, T(kNaN));
    fill_unused(zones, weights, static_cast<float>(kNaN));
    first_grads = converted_params<G>(random_params<double>(shape, form, rng));
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
  Tensor<T> expert_out, pre_act, grad_recv;
  Tensor<float> grad_weights;
  FfnParams<G> grads;
};

template <typename T, typename G>
Result<T, G> run_on_cuda(const FfnCase<T, G>& c, int num_sms) {
  const int64_t rows = c.zones.num_rows;
  Result<T, G> result = {scribbled<T>({rows, c.shape.hidden}), scribbled<T>({rows, c.pre_act_size()}),
                         scribbled<T>({rows, c.shape.hidden}), scribbled<float>({rows}),
                         c.accumulate ? c.first_grads : scribbled_like(c.first_grads)};
  const epx_moe_ffn_config config = ffn_config(c.shape);
  const epx_moe_ffn_params params = c.params.view();
  const epx_moe_ffn_params grads = result.grads.view();
  const auto on_sms = [&](const epx_moe_cuda* place) {
    epx_moe_cuda limited = *place;
    limited.num_sms = num_sms;
    return limited;
  };
  epx_moe_ffn_args fwd = {};
  fwd.struct_size = sizeof(fwd);
  fwd.params = &params;
  fwd.recv_tokens = c.recv_tokens.get();
  fwd.counts = c.zones.counts.get();
  fwd.offsets = c.zones.offsets.get();
  fwd.recv_weights = c.is_early ? c.weights.get() : nullptr;
  fwd.expert_out = result.expert_out.get();
  fwd.pre_act = result.pre_act.get();
  const epx_moe_cuda fwd_place = on_sms(place_of_call(epx_moe_ffn_workspace, &config, &fwd));
  fwd.cuda = &fwd_place;
  require_ok(epx_moe_ffn(&config, &fwd), "epx_moe_ffn");
  finish_call();

  epx_moe_ffn_bwd_args bwd = {};
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
  const epx_moe_cuda bwd_place = on_sms(place_of_call(epx_moe_ffn_bwd_workspace, &config, &bwd));
  bwd.cuda = &bwd_place;
  require_ok(epx_moe_ffn_bwd(&config, &bwd), "epx_moe_ffn_bwd");
  finish_call();
  return result;
}

// Rows in use are near the expected ones, and the others still hold what they held before.
template <typename T>
std::string rows_fault(const char* name, const Zones& zones, Tensor<T> actual, const Tensor<double>& expected,
                       double tolerance) {
  const Tensor<T> before = scribbled<T>({actual.size(0), actual.ndim() == 2 ? actual.size(1) : 1});
  for (int64_t row = 0; row < zones.num_rows; ++row)
    for (int64_t i = 0; i < actual.per_row() && !zones.used(row); ++i)
      if (std::memcmp(&actual(row, i), &before(row, i), sizeof(T)) != 0) return std::string(name) + ": a pad was written";
  Tensor<double> wide = expected;
  fill_unused(zones, actual, T{});
  fill_unused(zones, wide, 0.0);
  const std::string wrong = difference(converted<double>(actual), wide, tolerance, max_abs(wide));
  return wrong.empty() ? "" : std::string(name) + ": " + wrong;
}

// Returns what is wrong with one random case.
template <typename T, typename G>
std::string ffn_fault(uint64_t seed, double tolerance) {
  const FfnCase<T, G> c(seed);
  const Result<T, G> result = run_on_cuda(c, 0);

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
  if (c.is_early) wrong += rows_fault("grad_recv_weights", c.zones, result.grad_weights, backward.recv_weights, tolerance);
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

TEST_CASE("the FFN on CUDA computes what the host does in float64") {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    CAPTURE(seed);
    CHECK(ffn_fault<float, float>(seed, 1e-5) == "");
    CHECK(ffn_fault<Bfloat16, float>(seed, 2e-2) == "");
    CHECK(ffn_fault<Bfloat16, Bfloat16>(seed, 2e-2) == "");
    CHECK(ffn_fault<Float16, float>(seed, 3e-3) == "");
  }
}

TEST_CASE("the FFN has the same bits on any number of SMs") {
  for (uint64_t seed = 100; seed < 110; ++seed) {
    CAPTURE(seed);
    const FfnCase<Bfloat16, float> c(seed);
    const auto all = run_on_cuda(c, 0);
    const auto one = run_on_cuda(c, 1);
    CHECK(difference(one.expert_out, all.expert_out) == "");
    CHECK(difference(one.pre_act, all.pre_act) == "");
    CHECK(difference(one.grad_recv, all.grad_recv) == "");
    CHECK(difference(one.grad_weights, all.grad_weights) == "");
    for_each_tensor([](const char* name, const Tensor<float>& a,
                       const Tensor<float>& b) { CHECK_MESSAGE(difference(a, b) == "", name); },
                    one.grads, all.grads);
  }
}

TEST_CASE("zones of any values are reported, and nothing beyond the tensors is read or written") {
  Rng rng(77);
  for (int repeat = 0; repeat < 30; ++repeat) {
    CAPTURE(repeat);
    FfnCase<float, float> c(200);
    c.zones = make_zones({5, 0, 9}, 4, 2);
    c.shape.num_experts = 3;
    c.shape.activation = EPX_MOE_SWIGLU;
    c.params = converted_params<float>(random_params<double>(c.shape, c.form, rng));
    c.first_grads = c.params;
    c.recv_tokens = random_tensor<float>({c.zones.num_rows, c.shape.hidden}, rng);
    c.grad_out = c.recv_tokens;
    c.weights = random_tensor<float>({c.zones.num_rows}, rng);
    const auto noise = rng.pick<int32_t>({-1, 1 << 30, std::numeric_limits<int32_t>::min(), 200});
    const bool is_count = rng.chance(50);
    const int64_t at = rng.below(is_count ? 3 : 4);
    (is_count ? c.zones.counts : c.zones.offsets)[at] = noise;
    CHECK_THROWS_WITH(run_on_cuda(c, 0), doctest::Contains(is_count ? "counts[" : "s["));
  }
}

} // namespace
} // namespace epx::test
