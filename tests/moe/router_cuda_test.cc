// SPDX-License-Identifier: Apache-2.0
// The router on CUDA, in shapes that reach every kernel, against the host in float64.
#include <algorithm>
#include <cmath>
#include <string>

#include <doctest/doctest.h>

#include "tests/moe/router_run.h"

namespace epx::test {
namespace {

// Rows of K different experts, of which some are masked; all tokens may have the same ones.
Tensor<int64_t> random_selection(int64_t num_tokens, const epx_moe_router_config& config, Rng& rng) {
  Tensor<int64_t> topk_idx({num_tokens, config.top_k}, -1);
  const bool is_hot = rng.chance(20);
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (rng.chance(15)) continue;
    const int64_t first = is_hot ? 0 : rng.below(config.num_experts);
    for (int64_t k = 0; k < config.top_k; ++k)
      topk_idx(t, k) = (first + k) % config.num_experts;
  }
  return topk_idx;
}

// Compares with the host in float64, on what the logits are in their own type. Returns what is wrong.
template <typename Logit, typename Count>
std::string backward_fault(uint64_t seed) {
  Rng rng(mix(seed, 0xbac4));
  epx_moe_router_config config = router_config(static_cast<int>(rng.chance(30) ? rng.between(65, 600) : rng.between(1, 64)),
                                               1, rng.pick({kScores[0], kScores[1], kScores[2]}));
  config.top_k = static_cast<int>(rng.between(1, std::min(config.num_experts, 64)));
  config.renormalize = static_cast<int>(rng.below(2));
  config.scaling_factor = rng.pick({1.0, 2.5, -0.5});
  config.aux_loss_coeff = rng.pick({0.0, 0.25});
  const bool has_loss = config.aux_loss_coeff != 0;
  const int64_t num_tokens = rng.between(0, 40);
  const auto logits = converted<Logit>(random_tensor<double>({num_tokens, config.num_experts}, rng, -3, 3));
  const auto topk_idx = random_selection(num_tokens, config, rng);
  const auto grads = random_tensor<float>({num_tokens, config.top_k}, rng);
  Tensor<Count> counts({rng.between(1, 4), config.num_experts});
  for (int64_t i = 0; i < counts.count(); ++i)
    counts[i] = static_cast<Count>(rng.chance(20) ? 0 : rng.below(50));
  const bool has_weights = !has_loss || rng.chance(80);

  const auto actual = converted<double>(run_router_bwd<Logit, Count>(
      config, logits, topk_idx, {has_weights ? &grads : nullptr, has_loss ? &counts : nullptr, 0.7}));
  const double actual_loss = aux_loss(config, logits, topk_idx, counts);
  const OnHost in_float64;
  const auto wide_logits = converted<double>(logits);
  const auto wide_grads = converted<double>(grads);
  const auto expected = run_router_bwd<double, Count>(
      config, wide_logits, topk_idx, {has_weights ? &wide_grads : nullptr, has_loss ? &counts : nullptr, 0.7});
  const double expected_loss = aux_loss(config, wide_logits, topk_idx, counts);
  // A difference of nearly equal numbers has the error of these: at most that of the largest gradient.
  const double largest = std::max(max_abs(expected), has_weights ? 0.1 : 0.0);
  const double rounding = sizeof(Logit) == 2 ? 1.0 / 256 : 0; // to nearest, of 8 bits
  std::string wrong;
  for (int64_t i = 0; i < expected.count() && wrong.empty(); ++i)
    if (!(std::abs(actual[i] - expected[i]) <= 1e-5 * largest + rounding * std::abs(expected[i])))
      wrong = "grad_logits[" + std::to_string(i) + "] is " + std::to_string(actual[i]) + ", expected " +
              std::to_string(expected[i]);
  if (!(std::abs(actual_loss - expected_loss) <= 1e-5 * std::abs(expected_loss))) wrong += " the loss differs";
  return wrong;
}

TEST_CASE("random backwards and load-balance losses are those of the host in float64") {
  for (uint64_t seed = 0; seed < 10 * num_cases(50); ++seed) {
    const std::string wrong = seed % 3 == 0   ? backward_fault<float, int32_t>(seed)
                              : seed % 3 == 1 ? backward_fault<float, int64_t>(seed)
                                              : backward_fault<Bfloat16, int32_t>(seed);
    if (!wrong.empty()) FAIL_CHECK("seed " << seed << ": " << wrong);
  }
}

// The keys are the logits themselves here, so that no exponential may differ in its last bits.
TEST_CASE("groups and experts are those that the host selects, ties included") {
  for (uint64_t seed = 0; seed < num_cases(50); ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x9a3));
    const int group_size = static_cast<int>(rng.between(1, 70));
    epx_moe_router_config config = router_config(1, 1);
    config.num_groups = static_cast<int>(rng.between(1, 9));
    config.topk_groups = static_cast<int>(rng.between(1, config.num_groups));
    config.num_experts = config.num_groups * group_size;
    config.top_k = static_cast<int>(rng.between(1, std::min(config.topk_groups * group_size, 16)));
    config.group_score_top_k = static_cast<int>(rng.between(1, group_size));
    auto logits = random_tensor<float>({20, config.num_experts}, rng);
    const auto bias = random_tensor<float>({config.num_experts}, rng);
    const bool ties = rng.chance(50);
    for (int64_t i = 0; i < logits.count() && ties; ++i)
      logits[i] = rng.pick({0.0f, 0.5f});
    const auto selected = run_router(config, logits, ties ? nullptr : &bias).topk_idx;
    const OnHost and_now;
    CHECK(difference(selected, run_router(config, logits, ties ? nullptr : &bias).topk_idx) == "");
  }
}

TEST_CASE("the same input has the same bits") {
  Rng rng(71);
  epx_moe_router_config config = router_config(90, 6, EPX_MOE_SIGMOID);
  config.aux_loss_coeff = 0.1;
  const auto logits = random_tensor<float>({200, 90}, rng, -3, 3);
  const auto first = run_router(config, logits);
  const Tensor<int32_t> counts({2, 90}, 3);
  const double loss = aux_loss(config, logits, first.topk_idx, counts);
  const auto grads = run_router_bwd<float>(config, logits, first.topk_idx, {&first.topk_weights, &counts, 1});
  for (int i = 0; i < 3; ++i) {
    const auto again = run_router(config, logits);
    CHECK(difference(again.topk_idx, first.topk_idx) == "");
    CHECK(difference(again.topk_weights, first.topk_weights) == "");
    CHECK(aux_loss(config, logits, first.topk_idx, counts) == loss);
    CHECK(difference(run_router_bwd<float>(config, logits, first.topk_idx, {&first.topk_weights, &counts, 1}), grads) ==
          "");
  }
}

TEST_CASE("more groups than CUDA holds are refused") {
  epx_moe_router_config config = router_config(1025, 1);
  config.num_groups = 1025;
  const Tensor<float> logits({1, 1025});
  auto topk_idx = scribbled<int32_t>({1, 1});
  auto weights = scribbled<float>({1, 1});
  const epx_moe_router_args args = {sizeof(args), place_of_call(), logits.get(),  nullptr,
                                    nullptr,      topk_idx.get(),  weights.get(), nullptr};
  CHECK(epx_moe_router(&config, &args) == EPX_ERROR_UNSUPPORTED);
  CHECK(std::string(epx_last_error()).find("1025") != std::string::npos);
  CHECK(difference(weights, scribbled<float>({1, 1})) == "");
}

} // namespace
} // namespace epx::test
