// SPDX-License-Identifier: Apache-2.0
// These tests compare epx_moe_router_bwd with finite differences, and the load-balance loss with its formula, over three ranks
// whose counts the test adds up itself.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/router_oracle.h"
#include "tests/moe/router_run.h"

namespace epx::test {
namespace {

constexpr int kRanks = 3;

// Adds the routes of one rank to its row of the counts.
template <typename Index>
void count_routes(const Tensor<int64_t>& topk_idx, int rank, Tensor<Index>& global_counts) {
  for (const int64_t expert : topk_idx) {
    if (expert >= 0) ++global_counts(rank, expert);
  }
}

// Token 1 is masked. Rank 0 is the one whose gradient is looked at; the others are there in the counts.
void check_router_gradient(const epx_moe_router_config& config, uint64_t seed, const std::string& what) {
  Rng rng(mix(seed, 0x64ad));
  const bool with_aux = config.aux_loss_coeff != 0;
  constexpr double kAuxGrad = 0.7;
  auto logits = spaced_logits(5, config.num_experts, rng);
  const Tensor<uint8_t> mask({5}, {1, 0, 1, 1, 1});
  const auto cotangent = random_tensor<double>({5, config.top_k}, rng);
  const auto topk_idx = run_router(config, logits, nullptr, &mask).topk_idx;
  Tensor<int32_t> global_counts({kRanks, config.num_experts});
  count_routes(topk_idx, 0, global_counts);
  for (int rank = 1; rank < kRanks; ++rank)
    count_routes(run_router(config, spaced_logits(4, config.num_experts, rng)).topk_idx, rank, global_counts);

  const auto value = [&] {
    const auto routed = run_router(config, logits, nullptr, &mask);
    REQUIRE(difference(routed.topk_idx, topk_idx) == ""); // otherwise the case does not test what it has to
    return dot(routed.topk_weights, cotangent) +
           (with_aux ? kAuxGrad * aux_loss(config, logits, topk_idx, global_counts) : 0);
  };
  const auto analytic =
      run_router_bwd(config, logits, topk_idx, {&cotangent, with_aux ? &global_counts : nullptr, kAuxGrad});
  check_gradient(value, logits, analytic, what);
  for (int64_t e = 0; e < config.num_experts; ++e)
    CHECK(analytic(1, e) == 0);
}

TEST_CASE("gradients of the router: score x renormalisation x groups x load-balance loss") {
  struct Shape {
    int num_experts, top_k, num_groups, topk_groups;
  };
  uint64_t seed = 0;
  for (const Shape& shape : {Shape{7, 3, 1, 1}, Shape{8, 4, 4, 2}, Shape{4, 1, 1, 1}, Shape{4, 4, 1, 1}}) {
    for (const epx_moe_score score : kScores) {
      for (const int renormalize : {0, 1}) {
        for (const double coefficient : {0.0, 0.3}) {
          epx_moe_router_config config = router_config(shape.num_experts, shape.top_k, score);
          config.num_groups = shape.num_groups;
          config.topk_groups = shape.topk_groups;
          config.renormalize = renormalize;
          config.scaling_factor = 1.75;
          config.aux_loss_coeff = coefficient;
          check_router_gradient(config, ++seed,
                                "E " + std::to_string(shape.num_experts) + ", K " + std::to_string(shape.top_k) +
                                    ", score " + std::to_string(score) + ", renormalize " + std::to_string(renormalize) +
                                    ", aux_loss_coeff " + std::to_string(coefficient));
        }
      }
    }
  }
}

TEST_CASE("without grad_topk_weights the gradient is that of the loss alone") {
  Rng rng(21);
  epx_moe_router_config config = router_config(5, 2, EPX_MOE_SIGMOID);
  config.aux_loss_coeff = 0.2;
  auto logits = spaced_logits(4, 5, rng);
  const auto topk_idx = run_router(config, logits).topk_idx;
  Tensor<int32_t> global_counts({1, 5});
  count_routes(topk_idx, 0, global_counts);
  const auto analytic = run_router_bwd(config, logits, topk_idx, {nullptr, &global_counts, 1});
  CHECK(max_abs(analytic) > 1e-3);
  check_gradient([&] { return aux_loss(config, logits, topk_idx, global_counts); }, logits, analytic, "aux loss");

  config.aux_loss_coeff = 0;
  CHECK(max_abs(run_router_bwd(config, logits, topk_idx, {})) == 0);
}

TEST_CASE("logits of bad tokens do not reach a gradient") {
  Rng rng(22);
  const double nan = std::nan("");
  for (const epx_moe_score score : kScores) {
    CAPTURE(score);
    epx_moe_router_config config = router_config(5, 2, score);
    config.aux_loss_coeff = 0.2;
    auto logits = spaced_logits(3, 5, rng);
    logits(1, 3) = nan;
    const auto topk_idx = run_router(config, logits).topk_idx;
    REQUIRE(topk_idx(1, 0) == -1);
    Tensor<int32_t> global_counts({1, 5});
    count_routes(topk_idx, 0, global_counts);
    Tensor<double> cotangent({3, 2}, 1.5);
    cotangent(1, 0) = cotangent(1, 1) = nan;
    const auto grad_logits = run_router_bwd(config, logits, topk_idx, {&cotangent, &global_counts, 1});
    for (int64_t e = 0; e < 5; ++e) {
      CHECK(grad_logits(1, e) == 0);
      CHECK(std::isfinite(grad_logits(0, e)));
      CHECK(std::isfinite(grad_logits(2, e)));
    }
    CHECK(std::isfinite(aux_loss(config, logits, topk_idx, global_counts)));
  }
}

TEST_CASE("an expert of -infinity takes no part in a gradient") {
  for (const epx_moe_score score : kScores) {
    CAPTURE(score);
    const Tensor<double> logits({1, 3}, {1, -std::numeric_limits<double>::infinity(), 0.5});
    const epx_moe_router_config config = router_config(3, 3, score);
    const auto topk_idx = run_router(config, logits).topk_idx;
    const Tensor<double> cotangent({1, 3}, {1, -2, 3});
    const auto grad_logits = run_router_bwd(config, logits, topk_idx, {&cotangent});
    CHECK(grad_logits[1] == 0);
    CHECK(std::isfinite(grad_logits[0]));
    CHECK(grad_logits[0] != 0);
  }
}

TEST_CASE("the parts of three ranks add up to the load-balance loss of all tokens") {
  for (const epx_moe_score score : kScores) {
    CAPTURE(score);
    Rng rng(mix(static_cast<uint64_t>(score), 23));
    epx_moe_router_config config = router_config(6, 2, score);
    config.aux_loss_coeff = 0.01;
    const int64_t num_tokens[kRanks] = {4, 0, 7};
    const auto logits = random_tensor<double>({11, 6}, rng, -3, 3);
    Tensor<uint8_t> mask({11}, 1);
    mask[2] = mask[9] = 0;
    const auto all_idx = run_router(config, logits, nullptr, &mask).topk_idx;

    Tensor<int32_t> global_counts({kRanks, 6});
    std::vector<Tensor<int64_t>> topk_idx;
    for (int64_t rank = 0, first = 0; rank < kRanks; first += num_tokens[rank++]) {
      topk_idx.push_back(slice_rows(all_idx, first, num_tokens[rank]));
      count_routes(topk_idx.back(), static_cast<int>(rank), global_counts);
    }
    double sum = 0;
    for (int64_t rank = 0, first = 0; rank < kRanks; first += num_tokens[rank++]) {
      const double share =
          aux_loss(config, slice_rows(logits, first, num_tokens[rank]), topk_idx[static_cast<size_t>(rank)], global_counts);
      CHECK((share > 0) == (num_tokens[rank] > 0));
      sum += share;
    }
    CHECK(sum == doctest::Approx(balance_loss(config, logits, all_idx)).epsilon(on_cuda() ? 1e-6 : 1e-12));
  }
}

TEST_CASE("without tokens the load-balance loss and its gradient are 0") {
  for (const epx_moe_score score : kScores) {
    CAPTURE(score);
    epx_moe_router_config config = router_config(5, 2, score);
    config.aux_loss_coeff = 0.5;
    const Tensor<int32_t> none({2, 5}); // no rank has routes
    CHECK(aux_loss(config, Tensor<double>({0, 5}), Tensor<int64_t>({0, 2}), none) == 0);

    const Tensor<double> logits({3, 5}, 0.25);
    const Tensor<int64_t> masked({3, 2}, -1);
    CHECK(aux_loss(config, logits, masked, none) == 0);
    CHECK(max_abs(run_router_bwd(config, logits, masked, {nullptr, &none, 1})) == 0);
    // Counts that do not have this rank's routes, as a caller may give them by mistake, divide nothing by 0.
    const Tensor<int64_t> selected({3, 2}, {0, 1, 2, 3, 4, 0});
    CHECK(aux_loss(config, logits, selected, none) == 0);
    CHECK(max_abs(run_router_bwd(config, logits, selected, {nullptr, &none, 1})) == 0);

    const Tensor<int32_t> of_others({2, 5}, 4); // those of this rank are 0
    CHECK(aux_loss(config, Tensor<double>({0, 5}), Tensor<int64_t>({0, 2}), of_others) == 0);
    CHECK(aux_loss(config, logits, masked, of_others) == 0);
  }
}

TEST_CASE("a perfectly even load has a loss of c") {
  epx_moe_router_config config = router_config(4, 2, EPX_MOE_SOFTMAX_THEN_TOPK);
  config.aux_loss_coeff = 0.125;
  const Tensor<double> logits({2, 4}, 3.0); // p = 1/4
  const Tensor<int64_t> topk_idx({2, 2}, {0, 1, 2, 3});
  CHECK(aux_loss(config, logits, topk_idx, Tensor<int32_t>({1, 4}, 1)) == doctest::Approx(0.125).epsilon(1e-14));
}

} // namespace
} // namespace epx::test
