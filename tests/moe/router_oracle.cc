// SPDX-License-Identifier: Apache-2.0
#include "tests/moe/router_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace epx::test {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> softmax(std::vector<double> values) {
  const double largest = *std::max_element(values.begin(), values.end());
  for (double& value : values)
    value = std::exp(value - largest);
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  for (double& value : values)
    value /= sum;
  return values;
}

std::vector<double> sigmoid(std::vector<double> values) {
  for (double& value : values)
    value = 1 / (1 + std::exp(-value));
  return values;
}

void divide_by_sum(std::vector<double>& values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  for (double& value : values)
    value /= sum != 0 ? sum : 1; // all of them are 0 where all logits are -infinity
}

std::vector<double> scores_of(const epx_moe_router_config& config, const std::vector<double>& logits) {
  switch (config.score) {
  case EPX_MOE_SOFTMAX_THEN_TOPK:
    return softmax(logits);
  case EPX_MOE_SIGMOID:
    return sigmoid(logits);
  case EPX_MOE_TOPK_THEN_SOFTMAX:
    break;
  }
  return logits;
}

bool has_nan(const std::vector<double>& values) {
  return std::any_of(values.begin(), values.end(), [](double value) { return std::isnan(value); });
}

double largest_finite(const std::vector<double>& keys) {
  double largest = 0;
  for (const double key : keys)
    largest = std::isfinite(key) ? std::max(largest, std::abs(key)) : largest;
  return largest;
}

// Sorts indices by descending key, keeping the order of equal ones, and records the smallest difference of unequal ones.
void sort_by_key(std::vector<int>& indices, const std::vector<double>& keys, double scale, double& gap) {
  const auto key = [&](int i) { return keys[static_cast<size_t>(i)]; };
  std::stable_sort(indices.begin(), indices.end(), [&](int a, int b) { return key(a) > key(b); });
  for (size_t i = 1; i < indices.size(); ++i) {
    const double high = key(indices[i - 1]);
    const double low = key(indices[i]);
    if (high != low) gap = std::min(gap, (high - low) / scale);
  }
}

std::vector<int> iota(int first, int count) {
  std::vector<int> indices(static_cast<size_t>(count));
  std::iota(indices.begin(), indices.end(), first);
  return indices;
}

struct Choice {
  std::vector<int> experts; // empty when the token is bad
  std::vector<double> weights;
};

int keys_of_group(const epx_moe_router_config& config) {
  return config.group_score_top_k != 0 ? config.group_score_top_k : config.top_k / config.topk_groups;
}

// Returns the sum of the group's best keys, added best first.
double group_score(const epx_moe_router_config& config, const std::vector<double>& keys, int group, double& gap) {
  const int group_size = config.num_experts / config.num_groups;
  std::vector<int> members = iota(group * group_size, group_size);
  sort_by_key(members, keys, largest_finite(keys), gap);
  double score = 0;
  for (int i = 0; i < keys_of_group(config); ++i)
    score += keys[static_cast<size_t>(members[static_cast<size_t>(i)])];
  return score;
}

std::vector<int> candidates(const epx_moe_router_config& config, const std::vector<double>& keys, double& gap) {
  if (config.num_groups == 1) return iota(0, config.num_experts);
  std::vector<double> group_scores;
  for (int group = 0; group < config.num_groups; ++group)
    group_scores.push_back(group_score(config, keys, group, gap));
  if (has_nan(group_scores)) return {};
  std::vector<int> groups = iota(0, config.num_groups);
  sort_by_key(groups, group_scores, largest_finite(keys) * keys_of_group(config), gap);
  groups.resize(static_cast<size_t>(config.topk_groups));
  std::sort(groups.begin(), groups.end()); // so that experts stay in ascending order
  std::vector<int> experts;
  const int group_size = config.num_experts / config.num_groups;
  for (const int group : groups) {
    for (int i = 0; i < group_size; ++i)
      experts.push_back(group * group_size + i);
  }
  return experts;
}

Choice choose(const epx_moe_router_config& config, const std::vector<double>& logits, const Tensor<double>* bias,
              double& gap) {
  const std::vector<double> scores = scores_of(config, logits);
  std::vector<double> keys = scores;
  for (size_t e = 0; e < keys.size(); ++e)
    keys[e] += bias != nullptr ? (*bias)[static_cast<int64_t>(e)] : 0;
  if (has_nan(keys)) return {};
  std::vector<int> experts = candidates(config, keys, gap);
  if (experts.empty()) return {};
  sort_by_key(experts, keys, largest_finite(keys), gap);
  experts.resize(static_cast<size_t>(config.top_k));

  std::vector<double> weights;
  for (const int expert : experts)
    weights.push_back(scores[static_cast<size_t>(expert)]);
  if (config.score == EPX_MOE_TOPK_THEN_SOFTMAX) {
    weights = softmax(weights);
  } else if (config.renormalize != 0) {
    divide_by_sum(weights);
  }
  for (double& weight : weights)
    weight *= config.scaling_factor;
  if (has_nan(weights)) return {};
  return {experts, weights};
}

std::vector<double> row_of(const Tensor<double>& logits, int64_t t) {
  return {logits.begin() + t * logits.size(1), logits.begin() + (t + 1) * logits.size(1)};
}

} // namespace

RouterAnswer route(const epx_moe_router_config& config, const Tensor<double>& logits, const Tensor<double>* bias,
                   const Tensor<uint8_t>* mask) {
  const int64_t num_tokens = logits.size(0);
  RouterAnswer answer = {Tensor<int64_t>({num_tokens, config.top_k}, -1),
                         Tensor<double>({num_tokens, config.top_k}),
                         {0, 0, -1},
                         std::vector<double>(static_cast<size_t>(num_tokens), kInfinity)};
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (mask != nullptr && (*mask)[t] == 0) {
      ++answer.info[0];
      continue;
    }
    const Choice choice = choose(config, row_of(logits, t), bias, answer.gap[static_cast<size_t>(t)]);
    if (choice.experts.empty()) {
      if (answer.info[1]++ == 0) answer.info[2] = t;
      continue;
    }
    for (size_t k = 0; k < choice.experts.size(); ++k) {
      answer.topk_idx(t, static_cast<int64_t>(k)) = choice.experts[k];
      answer.topk_weights(t, static_cast<int64_t>(k)) = choice.weights[k];
    }
  }
  return answer;
}

std::vector<double> balance_probabilities(const epx_moe_router_config& config, const double* logits) {
  std::vector<double> p(logits, logits + config.num_experts);
  if (config.score != EPX_MOE_SIGMOID) return softmax(p);
  p = sigmoid(p);
  divide_by_sum(p);
  return p;
}

double balance_loss(const epx_moe_router_config& config, const Tensor<double>& logits, const Tensor<int64_t>& topk_idx) {
  std::vector<double> sum_p(static_cast<size_t>(config.num_experts));
  std::vector<double> counts(static_cast<size_t>(config.num_experts));
  double num_tokens = 0;
  for (int64_t t = 0; t < logits.size(0); ++t) {
    if (topk_idx(t, 0) < 0) continue;
    ++num_tokens;
    const std::vector<double> p = balance_probabilities(config, &logits(t, 0));
    for (size_t e = 0; e < p.size(); ++e)
      sum_p[e] += p[e];
    for (int64_t k = 0; k < config.top_k; ++k)
      ++counts[static_cast<size_t>(topk_idx(t, k))];
  }
  const double sum = std::inner_product(sum_p.begin(), sum_p.end(), counts.begin(), 0.0);
  return config.num_experts * config.aux_loss_coeff / (config.top_k * num_tokens * num_tokens) * sum;
}

} // namespace epx::test
