// SPDX-License-Identifier: Apache-2.0
// Group-limited selection against the gates that others have published, each written down here as its own code says it.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/router_run.h"

namespace epx::test {
namespace {

struct Shape {
  int num_experts, top_k, num_groups, topk_groups;
};

// A gate: how it scores, and how many of a group's keys, best first, it adds up.
struct Gate {
  const char* name;
  epx_moe_score score;
  bool has_bias;
  int group_score_top_k; // of epx's config
  std::function<double(const std::vector<double>& best_first, const Shape& shape)> group_score;
};

const Gate kDeepSeekV2 = { // modeling_deepseek.py, group_limited_greedy: view(n, n_group, -1).max(dim=-1).values
    "DeepSeek-V2", EPX_MOE_SOFTMAX_THEN_TOPK, false, 1,
    [](const std::vector<double>& best_first, const Shape&) { return best_first[0]; }};
const Gate kDeepSeekV3 = { // inference/model.py, Gate: topk(2, dim=-1)[0].sum(dim=-1)
    "DeepSeek-V3", EPX_MOE_SIGMOID, true, 2,
    [](const std::vector<double>& best_first, const Shape&) { return best_first[0] + best_first[1]; }};
const Gate kMegatron = { // moe_utils.py, group_limited_topk: topk(topk // group_topk, dim=-1)[0].sum(dim=-1)
    "Megatron", EPX_MOE_SIGMOID, true, 0, [](const std::vector<double>& best_first, const Shape& shape) {
      return std::accumulate(best_first.begin(), best_first.begin() + shape.top_k / shape.topk_groups, 0.0);
    }};

std::vector<double> scores_of(epx_moe_score score, const double* logits, int num_experts) {
  std::vector<double> scores(logits, logits + num_experts);
  const bool is_softmax = score == EPX_MOE_SOFTMAX_THEN_TOPK;
  double sum = 0;
  for (double& value : scores)
    sum += value = is_softmax ? std::exp(value) : 1 / (1 + std::exp(-value));
  for (double& value : scores)
    value /= is_softmax ? sum : 1;
  return scores;
}

// The indices of the `count` largest keys, largest first. `gap` becomes the smallest difference that decided.
std::vector<int> best(const std::vector<double>& keys, int count, double& gap) {
  std::vector<int> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int i) { return keys[static_cast<size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
  for (int i = 0; i < count && i + 1 < static_cast<int>(order.size()); ++i)
    gap = std::min(gap, key(order[static_cast<size_t>(i)]) - key(order[static_cast<size_t>(i) + 1]));
  order.resize(static_cast<size_t>(count));
  return order;
}

std::vector<int> published_selection(const Gate& gate, const Shape& shape, const double* logits, const Tensor<double>& bias,
                                     double& gap) {
  std::vector<double> keys = scores_of(gate.score, logits, shape.num_experts);
  for (int e = 0; e < shape.num_experts && gate.has_bias; ++e)
    keys[static_cast<size_t>(e)] += bias[e];
  const int group_size = shape.num_experts / shape.num_groups;
  std::vector<double> group_scores;
  for (int group = 0; group < shape.num_groups; ++group) {
    std::vector<double> members(keys.begin() + group * group_size, keys.begin() + (group + 1) * group_size);
    std::sort(members.begin(), members.end(), std::greater<>());
    group_scores.push_back(gate.group_score(members, shape));
  }
  const std::vector<int> groups = best(group_scores, shape.topk_groups, gap);
  for (int e = 0; e < shape.num_experts; ++e)
    if (std::find(groups.begin(), groups.end(), e / group_size) == groups.end()) keys[static_cast<size_t>(e)] = -INFINITY;
  return best(keys, shape.top_k, gap);
}

epx_moe_router_config config_of(const Gate& gate, const Shape& shape) {
  epx_moe_router_config config = router_config(shape.num_experts, shape.top_k, gate.score);
  config.num_groups = shape.num_groups;
  config.topk_groups = shape.topk_groups;
  config.group_score_top_k = gate.group_score_top_k;
  return config;
}

bool selects(const Tensor<int64_t>& topk_idx, int64_t token, const std::vector<int>& experts) {
  for (size_t k = 0; k < experts.size(); ++k)
    if (topk_idx(token, static_cast<int64_t>(k)) != experts[k]) return false;
  return true;
}

int64_t num_tokens() {
  return on_cuda() ? static_cast<int64_t>(10 * num_cases(200)) : 2000;
}

// Compares all tokens but those that rounding decides, of which there must be few.
void check_gate(const Gate& gate, const Shape& shape) {
  CAPTURE(gate.name);
  CAPTURE(shape.num_experts);
  CAPTURE(shape.top_k);
  CAPTURE(shape.topk_groups);
  Rng rng(mix(static_cast<uint64_t>(shape.num_experts * 1000 + shape.top_k), 0x6e0));
  const auto logits = converted<double>(random_tensor<float>({num_tokens(), shape.num_experts}, rng, -2, 2));
  const auto bias = converted<double>(random_tensor<float>({shape.num_experts}, rng, -0.2, 0.2));
  const auto topk_idx = run_router(config_of(gate, shape), logits, gate.has_bias ? &bias : nullptr).topk_idx;
  int64_t near_ties = 0, wrong = 0;
  for (int64_t token = 0; token < num_tokens(); ++token) {
    double gap = INFINITY;
    const auto experts = published_selection(gate, shape, &logits(token, 0), bias, gap);
    const bool is_near_tie = gap < (on_cuda() ? 1e-6 : 1e-13);
    near_ties += is_near_tie;
    wrong += !is_near_tie && !selects(topk_idx, token, experts);
  }
  CHECK(wrong == 0);
  CHECK(near_ties < num_tokens() / 20);
}

TEST_CASE("groups are selected as DeepSeek-V2, DeepSeek-V3 and Megatron select them") {
  for (const Shape& shape : {Shape{160, 6, 8, 3}, Shape{64, 8, 8, 4}, Shape{24, 5, 6, 2}})
    check_gate(kDeepSeekV2, shape); // the first is its own
  for (const Shape& shape : {Shape{256, 8, 8, 4}, Shape{64, 6, 8, 4}, Shape{48, 4, 4, 1}, Shape{64, 8, 8, 8}})
    check_gate(kDeepSeekV3, shape);
  for (const Shape& shape : {Shape{256, 8, 8, 4}, Shape{64, 6, 8, 3}, Shape{48, 4, 4, 1}})
    check_gate(kMegatron, shape);
}

// With DeepSeek-V2's own shape, the sum of the two best selects other experts for more than half of these tokens.
TEST_CASE("the number of experts in a group's score changes what many tokens select") {
  const Shape shape = {160, 6, 8, 3};
  Rng rng(91);
  const auto logits = random_tensor<double>({200, shape.num_experts}, rng, -2, 2);
  const auto best_one = run_router(config_of(kDeepSeekV2, shape), logits).topk_idx;
  epx_moe_router_config config = config_of(kDeepSeekV2, shape);
  config.group_score_top_k = 0; // K / topk_groups = 2
  const auto best_two = run_router(config, logits).topk_idx;
  int64_t others = 0;
  for (int64_t token = 0; token < 200; ++token)
    others += !selects(best_two, token, {best_one.begin() + token * 6, best_one.begin() + (token + 1) * 6});
  CHECK(others > 40);
}

} // namespace
} // namespace epx::test
