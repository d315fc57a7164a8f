// SPDX-License-Identifier: Apache-2.0
// Weights and probabilities that are shares of a sum of scores, where the scores underflow and where they do not.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/router_run.h"

namespace epx::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

epx_moe_router_config renormalizing(int num_experts, int top_k, epx_moe_score score) {
  epx_moe_router_config config = router_config(num_experts, top_k, score);
  config.renormalize = 1;
  config.aux_loss_coeff = 0.5;
  return config;
}

// Multiples of 1/64, which float32 holds beside thousands.
Tensor<double> coarse_logits(int64_t num_tokens, int64_t num_experts, double offset, Rng& rng) {
  auto logits = spaced_logits(num_tokens, num_experts, rng);
  for (int64_t i = 0; i < logits.count(); ++i)
    logits[i] = offset + std::nearbyint(logits[i] * 64) / 64;
  return logits;
}

// Shares of scores by logarithms in long double: `logits` of softmax scores or of sigmoids.
std::vector<double> true_shares(epx_moe_score score, const std::vector<double>& logits) {
  std::vector<long double> shares;
  const long double top = *std::max_element(logits.begin(), logits.end());
  for (const long double logit : logits)
    shares.push_back(std::exp(logit - top) / (score == EPX_MOE_SIGMOID ? 1 + std::exp(logit) : 1));
  const long double sum = std::accumulate(shares.begin(), shares.end(), 0.0L);
  std::vector<double> rounded;
  for (const long double share : shares)
    rounded.push_back(static_cast<double>(share / sum));
  return rounded;
}

std::vector<double> selected_logits(const Tensor<double>& logits, const Tensor<int64_t>& topk_idx, int64_t token) {
  std::vector<double> selected;
  for (int64_t k = 0; k < topk_idx.size(1); ++k)
    selected.push_back(logits(token, topk_idx(token, k)));
  return selected;
}

Tensor<int64_t> counts_of(const Tensor<int64_t>& topk_idx, int num_experts) {
  Tensor<int64_t> counts({1, num_experts});
  for (const int64_t expert : topk_idx)
    ++counts[expert];
  return counts;
}

template <typename Real>
void check_equal_logits(double value) {
  CAPTURE(value);
  const epx_moe_router_config config = renormalizing(8, 2, EPX_MOE_SIGMOID);
  const Tensor<Real> logits({4, 8}, static_cast<Real>(value));
  const auto routed = run_router<Real>(config, logits);
  CHECK(difference(routed.topk_weights, Tensor<Real>({4, 2}, Real{0.5})) == "");

  const Tensor<int64_t> balanced({4, 2}, {0, 1, 2, 3, 4, 5, 6, 7});
  const auto half = doctest::Approx(0.5).epsilon(sizeof(Real) == 4 ? 1e-6 : 1e-14);
  CHECK(aux_loss(config, logits, balanced, Tensor<int64_t>({1, 8}, 1)) == half);
  const auto counts = counts_of(routed.topk_idx, 8);
  CHECK(counts[0] == 4); // all tokens have the same two experts, and the loss is the same, since the probabilities are
  CHECK(aux_loss(config, logits, routed.topk_idx, counts) == half);

  // d loss / d logit = p (1 - sigmoid) (n_e - mean of n) * E c / (K T^2)
  const auto grads =
      converted<double>(run_router_bwd<Real, int64_t>(config, logits, routed.topk_idx, {nullptr, &counts, 1}));
  const double sigmoid = 1 / (1 + std::exp(-value));
  for (int64_t e = 0; e < 8; ++e) {
    const double wanted = (1 - sigmoid) / 8 * ((e < 2 ? 4.0 : 0.0) - 1) * 8 * 0.5 / (2 * 16);
    CHECK(grads(1, e) == doctest::Approx(wanted).epsilon(1e-6));
  }
}

TEST_CASE("equal logits have equal shares, whatever their value") {
  for (const double value : {0.0, -9.0, -28.0, -30.0, -45.0, -50.0, -60.0, -90.0, -110.0, -1e4, -1e30}) {
    check_equal_logits<float>(value);
    if (!on_cuda()) check_equal_logits<double>(value);
  }
}

TEST_CASE("shares of scores that underflow are those of the logits") {
  const double tolerance = on_cuda() ? 1e-6 : 1e-14;
  for (const double offset : {-7.0, -10.0, -27.0, -31.0, -60.0, -90.0, -300.0, -800.0, -5000.0}) {
    CAPTURE(offset);
    Rng rng(mix(static_cast<uint64_t>(-offset), 0x5a11));
    const epx_moe_router_config config = renormalizing(9, 4, EPX_MOE_SIGMOID);
    const auto logits = coarse_logits(20, 9, offset, rng);
    const auto routed = run_router(config, logits);
    Tensor<double> wanted({20, 4});
    double probabilities = 0; // of each token's first expert
    for (int64_t token = 0; token < 20; ++token) {
      const auto shares = true_shares(config.score, selected_logits(logits, routed.topk_idx, token));
      for (int64_t k = 0; k < 4; ++k)
        wanted(token, k) = shares[static_cast<size_t>(k)];
      const auto p = true_shares(config.score, {logits.begin() + token * 9, logits.begin() + (token + 1) * 9});
      for (int64_t e = 0; e < 9; ++e)
        probabilities += p[static_cast<size_t>(e)] * static_cast<double>(e);
    }
    CHECK(difference(routed.topk_weights, wanted, tolerance) == "");
    const Tensor<int64_t> counts({1, 9}, {0, 1, 2, 3, 4, 5, 6, 7, 8}); // 9 tokens' routes
    CHECK(aux_loss(config, logits, routed.topk_idx, counts) ==
          doctest::Approx(9 * 0.5 / (4 * 81) * probabilities).epsilon(tolerance));
  }
}

// A bias can select experts that the softmax gives next to nothing.
Tensor<double> bias_for(int num_experts, int favored) {
  Tensor<double> bias({num_experts});
  for (int64_t e = 0; e < favored; ++e)
    bias[e] = 2 - 0.125 * static_cast<double>(e);
  return bias;
}

TEST_CASE("renormalised weights of a softmax that underflows are those of the logits") {
  const epx_moe_router_config config = renormalizing(6, 3, EPX_MOE_SOFTMAX_THEN_TOPK);
  const auto bias = bias_for(6, 3);
  for (const double offset : {-20.0, -29.0, -45.0, -60.0, -110.0, -900.0}) {
    CAPTURE(offset);
    const Tensor<double> logits({1, 6}, {offset, offset + 1, offset - 0.5, 1, 0, 2});
    const auto routed = run_router(config, logits, &bias);
    CHECK(routed.topk_idx[0] == 0);
    const auto wanted = true_shares(config.score, {offset, offset + 1, offset - 0.5});
    CHECK(difference(routed.topk_weights, Tensor<double>({1, 3}, wanted), on_cuda() ? 1e-6 : 1e-14) == "");
  }
}

TEST_CASE("gradients through scores that underflow") {
  for (const epx_moe_score score : {EPX_MOE_SIGMOID, EPX_MOE_SOFTMAX_THEN_TOPK}) {
    for (const double offset : {-10.0, -28.0, -31.0, -60.0, -300.0, -800.0}) {
      CAPTURE(score);
      CAPTURE(offset);
      Rng rng(mix(static_cast<uint64_t>(-offset), static_cast<uint64_t>(score)));
      epx_moe_router_config config = renormalizing(7, 3, score);
      config.scaling_factor = 1.75;
      auto logits = coarse_logits(3, 7, 0, rng); // beside which the offset stays, so that steps are of logits near 1
      const auto bias = bias_for(7, 3);
      const auto with_offset = [&] {
        auto moved = logits;
        for (int64_t i = 0; i < moved.count(); ++i)
          if (score == EPX_MOE_SIGMOID || i % 7 < 3) moved[i] += offset;
        return moved;
      };
      const auto topk_idx = run_router(config, with_offset(), &bias).topk_idx;
      const Tensor<int64_t> counts({1, 7}, {9, 0, 4, 1, 3, 1, 3});
      const auto cotangent = random_tensor<double>({3, 3}, rng);
      const auto value = [&] {
        const auto moved = with_offset();
        const auto routed = run_router(config, moved, &bias);
        REQUIRE(difference(routed.topk_idx, topk_idx) == "");
        return dot(routed.topk_weights, cotangent) + aux_loss(config, moved, topk_idx, counts);
      };
      const auto analytic = run_router_bwd<double, int64_t>(config, with_offset(), topk_idx, {&cotangent, &counts, 1});
      CHECK(max_abs(analytic) > 0.05);
      check_gradient(value, logits, analytic, "small scores");
    }
  }
}

TEST_CASE("logits that are all -infinity have no shares and no gradient") {
  const epx_moe_router_config config = renormalizing(4, 2, EPX_MOE_SIGMOID);
  const Tensor<double> logits({1, 4}, -kInfinity);
  const auto routed = run_router(config, logits);
  CHECK(routed.topk_idx[0] == 0);
  CHECK(difference(routed.topk_weights, Tensor<double>({1, 2})) == "");
  CHECK(routed.info[1] == 0);
  const Tensor<int64_t> counts({1, 4}, {1, 1, 0, 0});
  CHECK(aux_loss(config, logits, routed.topk_idx, counts) == 0);
  const Tensor<double> cotangent({1, 2}, {1, -2});
  CHECK(max_abs(run_router_bwd<double, int64_t>(config, logits, routed.topk_idx, {&cotangent, &counts, 1})) == 0);
}

// What the router computed when it added 1e-20 to each sum, for one token of sigmoids.
template <typename Real>
struct WithAddend {
  std::vector<Real> scores;
  Real addend = static_cast<Real>(1e-20);

  explicit WithAddend(const Real* logits, int num_experts) {
    for (int e = 0; e < num_experts; ++e)
      scores.push_back(1 / (1 + std::exp(-logits[e])));
  }
  Real score(int64_t expert) const { return scores[static_cast<size_t>(expert)]; }
  Real sum_of(const int64_t* experts, int count) const {
    Real sum = 0;
    for (int k = 0; k < count; ++k)
      sum += score(experts[k]);
    return sum + addend;
  }
  Real sum() const { return std::accumulate(scores.begin(), scores.end(), Real{0}) + addend; }
};

template <typename Real>
void check_ordinary_bits(double low, double high) {
  CAPTURE(low);
  Rng rng(mix(static_cast<uint64_t>(-low), 0xb175));
  constexpr int kExperts = 6, kTopK = 3, kTokens = 200;
  const epx_moe_router_config config = renormalizing(kExperts, kTopK, EPX_MOE_SIGMOID);
  const auto logits = random_tensor<Real>({kTokens, kExperts}, rng, low, high);
  const auto cotangent = random_tensor<Real>({kTokens, kTopK}, rng);
  const Tensor<int64_t> counts({1, kExperts}, {100, 50, 30, 220, 100, 100});
  const auto routed = run_router<Real>(config, logits);
  const double scale = kExperts * 0.5 / (kTopK * 200.0 * 200.0);

  Tensor<Real> weights({kTokens, kTopK}), grads({kTokens, kExperts});
  double loss = 0;
  for (int64_t token = 0; token < kTokens; ++token) {
    const WithAddend<Real> former(&logits(token, 0), kExperts);
    const int64_t* const experts = &routed.topk_idx(token, 0);
    const Real selected_sum = former.sum_of(experts, kTopK);
    Real mean = 0;
    for (int k = 0; k < kTopK; ++k) {
      weights(token, k) = former.score(experts[k]) / selected_sum;
      mean += former.score(experts[k]) * cotangent(token, k);
    }
    for (int k = 0; k < kTopK; ++k) {
      const Real score = former.score(experts[k]);
      grads(token, experts[k]) += score * (1 - score) * ((cotangent(token, k) - mean / selected_sum) / selected_sum);
    }
    Real grad_mean = 0;
    for (int e = 0; e < kExperts; ++e) {
      const Real p = former.score(e) / former.sum();
      loss += static_cast<double>(p) * static_cast<double>(counts[e]);
      grad_mean += p * static_cast<Real>(scale * static_cast<double>(counts[e]));
    }
    for (int e = 0; e < kExperts; ++e) {
      const Real score = former.score(e) / former.sum() * former.sum();
      const Real grad = static_cast<Real>(scale * static_cast<double>(counts[e])) - grad_mean;
      grads(token, e) += score * (1 - score) * (grad / former.sum());
    }
  }
  CHECK(difference(routed.topk_weights, weights) == "");
  CHECK(aux_loss(config, logits, routed.topk_idx, counts) == scale * loss);
  CHECK(difference(run_router_bwd<Real, int64_t>(config, logits, routed.topk_idx, {&cotangent, &counts, 1}), grads) == "");
}

TEST_CASE("where scores do not underflow, results have the bits that they had with 1e-20 in the sum") {
  const OnHost whose_exponential_is_that_of_the_test;
  check_ordinary_bits<float>(-4, 4);
  check_ordinary_bits<float>(-29, -27); // 3 sigmoids of -29 are more than 2^-42, below which the sum would change
  check_ordinary_bits<double>(-4, 4);
  check_ordinary_bits<double>(-9, -7); // 2^-13
}

} // namespace
} // namespace epx::test
