// SPDX-License-Identifier: Apache-2.0
// epx_moe_router against the oracle and closed forms, and epx_moe_bias_update.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/router_oracle.h"
#include "tests/moe/router_run.h"

namespace epx::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr int kMaxTopK = 64; // unless more groups are to be selected, each with an expert

struct Tally {
  int64_t tokens = 0;
  int64_t near_ties = 0; // these are not compared, since rounding decides them
};

epx_moe_router_config random_config(int max_experts, Rng& rng) {
  epx_moe_router_config config =
      router_config(static_cast<int>(rng.between(1, max_experts)), 1, rng.pick({kScores[0], kScores[1], kScores[2]}));
  if (rng.chance(50)) {
    do
      config.num_groups = static_cast<int>(rng.between(1, config.num_experts));
    while (config.num_experts % config.num_groups != 0);
    config.topk_groups = static_cast<int>(rng.between(1, config.num_groups));
  }
  const int group_size = config.num_experts / config.num_groups;
  if (rng.chance(50)) {
    config.group_score_top_k = static_cast<int>(rng.between(1, group_size));
    config.top_k = static_cast<int>(rng.between(1, std::min(config.topk_groups * group_size, kMaxTopK)));
  } else {
    const int max_per_group = std::min(group_size, std::max(1, kMaxTopK / config.topk_groups));
    config.top_k = config.topk_groups * static_cast<int>(rng.between(1, max_per_group));
  }
  config.renormalize = static_cast<int>(rng.below(2));
  config.scaling_factor = rng.pick({1.0, 2.5, -0.5});
  return config;
}

// Logits of one case are either spread or of three values, so that ties abound. The three are such that no two different
// sums of their scores are equal. Of more experts than 64, spread ones are so close that rounding decides; these are evenly
// spaced.
Tensor<double> random_logits(int64_t num_tokens, int64_t num_experts, bool ties, Rng& rng) {
  Tensor<double> logits({num_tokens, num_experts});
  if (num_experts > 64 && !ties) {
    logits = spaced_logits(num_tokens, num_experts, rng);
    for (int64_t i = 0; i < logits.count(); ++i)
      logits[i] *= 6.0 / static_cast<double>(num_experts);
  }
  for (int64_t i = 0; i < logits.count(); ++i) {
    if (ties || num_experts <= 64) logits[i] = ties ? rng.pick({0.0, 1.0, 3.0}) : uniform(rng, -2, 2);
    if (rng.chance(2)) logits[i] = -kInfinity;
  }
  return logits;
}

// Returns what is wrong.
template <typename Logit, typename Index>
std::string random_case(uint64_t seed, Tally& tally) {
  using Real = RealOf<Logit>;
  Rng rng(mix(seed, 0x40c7e5));
  const bool is_wide = on_cuda() && rng.chance(40); // the kernels hold 64, 256 or 512 experts in registers, or none
  const epx_moe_router_config config = random_config(is_wide ? 600 : 64, rng);
  const int64_t num_tokens = rng.between(0, 20);
  const bool ties = rng.chance(40);
  const bool with_bias = rng.chance(50);
  const bool with_mask = rng.chance(50);
  const auto logits = converted<Logit>(random_logits(num_tokens, config.num_experts, ties, rng));
  // Where rounding could tell sums apart that are equal, (a + bias) + b and a + (b + bias), a case of ties has no bias.
  const bool exact_sums = config.score == EPX_MOE_TOPK_THEN_SOFTMAX || config.num_groups == 1;
  Tensor<Real> bias({config.num_experts});
  for (int64_t e = 0; e < bias.count(); ++e)
    bias[e] = static_cast<Real>(!ties ? uniform(rng) : exact_sums ? rng.pick({0.0, 0.25}) : 0.0);
  Tensor<uint8_t> mask({num_tokens});
  for (int64_t t = 0; t < num_tokens; ++t)
    mask[t] = rng.pick<uint8_t>({0, 1, 1, 255});

  const auto routed = run_router<Logit, Index>(config, logits, with_bias ? &bias : nullptr, with_mask ? &mask : nullptr);
  const auto wide_bias = converted<double>(bias);
  RouterAnswer expected =
      route(config, converted<double>(logits), with_bias ? &wide_bias : nullptr, with_mask ? &mask : nullptr);
  const auto topk_idx = converted<int64_t>(routed.topk_idx);
  const auto topk_weights = converted<double>(routed.topk_weights);
  constexpr bool kWide = sizeof(Real) == 8;
  for (int64_t t = 0; t < num_tokens; ++t) {
    ++tally.tokens;
    if (expected.gap[static_cast<size_t>(t)] > (kWide ? 1e-13 : 3e-6)) continue;
    ++tally.near_ties;
    for (int64_t k = 0; k < config.top_k; ++k) {
      expected.topk_idx(t, k) = topk_idx(t, k);
      expected.topk_weights(t, k) = topk_weights(t, k);
    }
  }
  std::string wrong = difference(topk_idx, expected.topk_idx);
  if (wrong.empty()) wrong = difference(topk_weights, expected.topk_weights, kWide ? 1e-12 : 5e-6);
  if (wrong.empty()) wrong = difference(routed.info, Tensor<int64_t>({3}, {expected.info.begin(), expected.info.end()}));
  return wrong;
}

template <typename T>
std::vector<T> values(const Tensor<T>& tensor) {
  return {tensor.begin(), tensor.end()};
}

double tolerance() {
  return on_cuda() ? 1e-6 : 1e-14;
}
void check_near(const Tensor<double>& actual, const Tensor<double>& expected) {
  CHECK(difference(actual, expected, tolerance()) == "");
}

TEST_CASE("random cases have the oracle's routes and weights") {
  Tally tally;
  const uint64_t num_cases = on_cuda() ? 500 : 2000;
  for (uint64_t seed = 0; seed < num_cases; ++seed) {
    const std::string wrong = seed % 4 == 0   ? random_case<float, int32_t>(seed, tally)
                              : seed % 4 == 1 ? random_case<float, int64_t>(seed, tally)
                              : on_cuda()     ? random_case<Bfloat16, int32_t>(seed, tally)
                              : seed % 4 == 2 ? random_case<double, int32_t>(seed, tally)
                                              : random_case<double, int64_t>(seed, tally);
    if (!wrong.empty()) FAIL_CHECK("seed " << seed << ": " << wrong);
  }
  CHECK(tally.tokens > static_cast<int64_t>(num_cases) * 15 / 2);
  CHECK(tally.near_ties < tally.tokens / (on_cuda() ? 10 : 50));
}

TEST_CASE("a token with a NaN logit has no routes and changes no other token") {
  Rng rng(11);
  const auto good_logits = random_tensor<double>({6, 6}, rng);
  const Tensor<uint8_t> mask({6}, {1, 1, 1, 0, 1, 1});
  for (const epx_moe_score score : kScores) {
    for (const int num_groups : {1, 3}) {
      for (int64_t expert = 0; expert < 6; ++expert) {
        CAPTURE(score);
        CAPTURE(num_groups);
        CAPTURE(expert);
        epx_moe_router_config config = router_config(6, 2, score);
        config.num_groups = num_groups;
        auto expected = run_router(config, good_logits, nullptr, &mask);
        auto logits = good_logits;
        for (const int64_t token : {2, 3, 4}) { // 3 is masked anyway
          logits(token, expert) = kNaN;
          for (int64_t k = 0; k < 2; ++k) {
            expected.topk_idx(token, k) = -1;
            expected.topk_weights(token, k) = 0;
          }
        }
        const auto routed = run_router(config, logits, nullptr, &mask);
        CHECK(difference(routed.topk_idx, expected.topk_idx) == "");
        CHECK(difference(routed.topk_weights, expected.topk_weights) == "");
        CHECK(values(routed.info) == std::vector<int64_t>{1, 2, 2});
      }
    }
  }
}

TEST_CASE("-infinity excludes an expert from weight, not from selection") {
  const double a = std::log(2.0);
  const Tensor<double> logits({1, 4}, {0, -kInfinity, a, -kInfinity});
  for (const epx_moe_score score : kScores) {
    CAPTURE(score);
    const auto routed = run_router(router_config(4, 3, score), logits);
    CHECK(values(routed.topk_idx) == std::vector<int64_t>{2, 0, 1});
    CHECK(values(routed.info) == std::vector<int64_t>{0, 0, -1});
    check_near(routed.topk_weights, score == EPX_MOE_SIGMOID ? Tensor<double>({1, 3}, {2.0 / 3, 0.5, 0})
                                                             : Tensor<double>({1, 3}, {2.0 / 3, 1.0 / 3, 0}));
  }
}

TEST_CASE("infinities that make a weight NaN make a token bad") {
  const Tensor<double> logits({3, 3}, {0, kInfinity, 1, -kInfinity, -kInfinity, -kInfinity, 2, 1, 0});
  for (const epx_moe_score score : {EPX_MOE_TOPK_THEN_SOFTMAX, EPX_MOE_SOFTMAX_THEN_TOPK}) {
    CAPTURE(score);
    const auto routed = run_router(router_config(3, 2, score), logits);
    CHECK(values(routed.topk_idx) == std::vector<int64_t>{-1, -1, -1, -1, 0, 1});
    CHECK(routed.topk_weights(0, 0) == 0);
    CHECK(routed.topk_weights(1, 1) == 0);
    CHECK(routed.topk_weights(2, 0) > 0);
    CHECK(values(routed.info) == std::vector<int64_t>{0, 2, 0});
  }
  epx_moe_router_config groups = router_config(4, 2); // a group without a score makes a token bad, even one not selected
  groups.num_groups = 2;
  const auto grouped = run_router(groups, Tensor<double>({2, 4}, {kInfinity, -kInfinity, 1, 2, 3, 4, 1, 2}));
  CHECK(values(grouped.topk_idx) == std::vector<int64_t>{-1, -1, 1, 0});
  CHECK(values(grouped.info) == std::vector<int64_t>{0, 1, 0});
  for (const int renormalize : {0, 1}) { // sigmoid has a value everywhere
    CAPTURE(renormalize);
    epx_moe_router_config config = router_config(3, 2, EPX_MOE_SIGMOID);
    config.renormalize = renormalize;
    const auto routed = run_router(config, logits);
    CHECK(values(routed.topk_idx) == std::vector<int64_t>{1, 2, 0, 1, 0, 1});
    CHECK(values(routed.info) == std::vector<int64_t>{0, 0, -1});
    CHECK(routed.topk_weights(1, 0) == 0);
    const double s1 = 1 / (1 + std::exp(-1.0));
    CHECK(routed.topk_weights(0, 0) == doctest::Approx(renormalize == 0 ? 1.0 : 1 / (1 + s1)).epsilon(tolerance()));
  }
}

TEST_CASE("a NaN in the bias makes every token bad that is not masked") {
  Rng rng(12);
  const auto logits = random_tensor<double>({4, 3}, rng);
  const Tensor<double> bias({3}, {0.5, 0, kNaN});
  const Tensor<uint8_t> mask({4}, {0, 1, 1, 1});
  for (const epx_moe_score score : kScores) {
    CAPTURE(score);
    const auto routed = run_router(router_config(3, 1, score), logits, &bias, &mask);
    CHECK(values(routed.topk_idx) == std::vector<int64_t>{-1, -1, -1, -1});
    CHECK(values(routed.topk_weights) == std::vector<double>{0, 0, 0, 0});
    CHECK(values(routed.info) == std::vector<int64_t>{1, 3, 1});
  }
}

TEST_CASE("ties go to the lower index, among experts and among groups") {
  const Tensor<double> logits({1, 6}, 0.75);
  const double sigmoid = 1 / (1 + std::exp(-0.75));
  for (const epx_moe_score score : kScores) {
    CAPTURE(score);
    epx_moe_router_config config = router_config(6, 4, score);
    const double weight = score == EPX_MOE_SIGMOID ? sigmoid : score == EPX_MOE_SOFTMAX_THEN_TOPK ? 1.0 / 6 : 0.25;
    auto routed = run_router(config, logits);
    CHECK(values(routed.topk_idx) == std::vector<int64_t>{0, 1, 2, 3});
    check_near(routed.topk_weights, Tensor<double>({1, 4}, weight));

    config.num_groups = 3;
    config.topk_groups = 2;
    routed = run_router(config, logits);
    CHECK(values(routed.topk_idx) == std::vector<int64_t>{0, 1, 2, 3});

    const Tensor<double> bias({6}, {0, 0, 1, 0, 1, 1}); // groups score 0, 1 and 2 more
    routed = run_router(config, logits, &bias);
    CHECK(values(routed.topk_idx) == std::vector<int64_t>{2, 4, 5, 3});
    check_near(routed.topk_weights, Tensor<double>({1, 4}, weight)); // the bias has no weight
  }
  // Groups whose scores are equal though their experts differ: 1 + 3 and 2 + 2, then 3, then 2.
  epx_moe_router_config config = router_config(6, 2);
  config.num_groups = 3;
  const Tensor<double> sums({2, 6}, {0, 0, 2, 2, 1, 3, 1, 3, 2, 2, 0, 0});
  CHECK(values(run_router(config, sums).topk_idx) == std::vector<int64_t>{2, 3, 1, 0});
  config.group_score_top_k = 1;
  const Tensor<double> bests({1, 6}, {0, 2, 3, 1, 3, 2});
  CHECK(values(run_router(config, bests).topk_idx) == std::vector<int64_t>{2, 3});
}

TEST_CASE("a group's score is the sum of its K / topk_groups best, or of its group_score_top_k best") {
  epx_moe_router_config config = router_config(6, 2);
  config.num_groups = 2;
  const Tensor<double> logits({2, 6}, {9, 0, 0, 5, 5, 0, 9, 2, 0, 5, 5, 0});
  CHECK(values(run_router(config, logits).topk_idx) == std::vector<int64_t>{3, 4, 0, 1}); // 9 + 0 < 5 + 5 < 9 + 2
  config.group_score_top_k = 1;
  CHECK(values(run_router(config, logits).topk_idx) == std::vector<int64_t>{0, 1, 0, 1});
  config.group_score_top_k = 2;
  CHECK(values(run_router(config, logits).topk_idx) == std::vector<int64_t>{3, 4, 0, 1});
  config.topk_groups = 2;
  CHECK(values(run_router(config, logits).topk_idx) == std::vector<int64_t>{0, 3, 0, 3});
  config.group_score_top_k = 0;
  CHECK(values(run_router(config, logits).topk_idx) == std::vector<int64_t>{0, 3, 0, 3});
}

TEST_CASE("K of 1 and of E") {
  const Tensor<double> logits({2, 3}, {1, 3, 2, 0.5, -1, 4});
  const auto one = run_router(router_config(3, 1), logits);
  CHECK(values(one.topk_idx) == std::vector<int64_t>{1, 2});
  CHECK(values(one.topk_weights) == std::vector<double>{1, 1});

  const auto before = run_router(router_config(3, 3, EPX_MOE_TOPK_THEN_SOFTMAX), logits);
  const auto after = run_router(router_config(3, 3, EPX_MOE_SOFTMAX_THEN_TOPK), logits);
  CHECK(values(before.topk_idx) == std::vector<int64_t>{1, 2, 0, 2, 0, 1});
  CHECK(difference(after.topk_idx, before.topk_idx) == "");
  check_near(after.topk_weights, before.topk_weights);

  const auto single = run_router(router_config(1, 1, EPX_MOE_SOFTMAX_THEN_TOPK), Tensor<double>({1, 1}, -7.0));
  CHECK(single.topk_idx[0] == 0);
  CHECK(single.topk_weights[0] == 1);
}

TEST_CASE("no tokens") {
  const auto routed = run_router(router_config(5, 2), Tensor<float>({0, 5}));
  CHECK(values(routed.info) == std::vector<int64_t>{0, 0, -1});
}

TEST_CASE("the defaults of a router") {
  epx_moe_router_config config;
  std::memset(&config, 0xA5, sizeof(config));
  REQUIRE(epx_moe_router_config_init(&config, sizeof(config)) == EPX_SUCCESS);
  CHECK(config.struct_size == sizeof(config));
  CHECK(config.num_experts == 0);
  CHECK(config.top_k == 0);
  CHECK(config.score == EPX_MOE_TOPK_THEN_SOFTMAX);
  CHECK(config.num_groups == 1);
  CHECK(config.topk_groups == 1);
  CHECK(config.renormalize == 0);
  CHECK(config.scaling_factor == 1);
  CHECK(config.aux_loss_coeff == 0);
  CHECK(config.group_score_top_k == 0);
  CHECK(epx_moe_router_config_init(nullptr, sizeof(config)) == EPX_ERROR_INVALID_ARGUMENT);
}

template <typename Real, typename Index>
void update_bias(const Tensor<Index>& counts, double rate, Tensor<Real>& bias) {
  const epx_moe_bias_update_args args = {sizeof(args), place_of_call(), counts.get(), rate, bias.get()};
  require_ok(epx_moe_bias_update(&args), "epx_moe_bias_update");
  finish_call();
}

template <typename Real, typename Index>
std::string bias_update_fault() {
  Tensor<Real> bias({4}, {0, 1, -2, 0.5});
  const Tensor<Index> counts({2, 4}, {1, 0, 5, 2, 2, 2, 3, 1}); // sums 3, 2, 8, 3 with a mean of 4
  update_bias(counts, 0.125, bias);
  return difference(bias, Tensor<Real>({4}, {0.125, 1.125, -2.125, 0.625}));
}

TEST_CASE("the bias goes up for experts below the mean and down for those above") {
  CHECK(bias_update_fault<float, int32_t>() == "");
  CHECK(bias_update_fault<float, int64_t>() == "");
  if (!on_cuda()) CHECK(bias_update_fault<double, int64_t>() == "");

  // A mean that no integer is, and an expert that has just the mean.
  for (const auto& [counts, expected] : {std::pair{Tensor<int32_t>({1, 2}, {3, 4}), Tensor<float>({2}, {0.5f, -0.5f})},
                                         std::pair{Tensor<int32_t>({1, 2}, {4, 4}), Tensor<float>({2}, {0, 0})}}) {
    Tensor<float> bias({2});
    update_bias(counts, 0.5, bias);
    CHECK(difference(bias, expected) == "");
  }
}

TEST_CASE("one route more than the mean counts while all routes together are below 2^53") {
  for (int64_t experts = 2; experts <= 9; ++experts) {
    CAPTURE(experts);
    const int64_t most = ((int64_t{1} << 53) - 2) / experts;
    Tensor<int64_t> counts({1, experts}, most);
    Tensor<float> bias({experts}), expected({experts}, 0.5f);
    ++counts[experts - 1];
    expected[experts - 1] = -0.5f;
    update_bias(counts, 0.5, bias);
    CHECK(difference(bias, expected) == "");
  }
  // Beyond, counts that are the same in float64 are equal to the mean.
  const Tensor<int64_t> counts({1, 2}, {int64_t{1} << 53, (int64_t{1} << 53) + 1});
  Tensor<float> bias({2});
  update_bias(counts, 0.5, bias);
  CHECK(difference(bias, Tensor<float>({2})) == "");
}

} // namespace
} // namespace epx::test
