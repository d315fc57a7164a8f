// SPDX-License-Identifier: Apache-2.0
#include "moe/router/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "moe/router/rules.h"

namespace epx::moe {
namespace {

template <typename T>
T sigmoid(T logit) {
  return 1 / (1 + std::exp(-logit));
}

// softmax of `logits` into `out`; NaN when no logit is finite, or one is NaN or +infinity.
template <typename T>
void softmax(std::span<const T> logits, std::span<T> out) {
  const T top = *std::max_element(logits.begin(), logits.end());
  T sum = 0;
  for (size_t i = 0; i < logits.size(); ++i)
    sum += out[i] = std::exp(logits[i] - top);
  for (T& value : out)
    value /= sum;
}

// Scores of one token: what the weights are made of. With TOPK_THEN_SOFTMAX these are the logits themselves.
template <typename T>
void score(epx_moe_score how, std::span<const T> logits, std::span<T> scores) {
  switch (how) {
  case EPX_MOE_TOPK_THEN_SOFTMAX:
    std::copy(logits.begin(), logits.end(), scores.begin());
    return;
  case EPX_MOE_SOFTMAX_THEN_TOPK:
    softmax(logits, scores);
    return;
  case EPX_MOE_SIGMOID:
    for (size_t e = 0; e < logits.size(); ++e)
      scores[e] = sigmoid(logits[e]);
    return;
  }
}

// The shares of scores in their sum, from the logits: those of softmax are exp(logit) and those of sigmoids exp(logit) / (1 +
// exp(logit)), up to a factor. 0 where all logits are -infinity.
template <typename T>
void shares_of_logits(epx_moe_score how, std::span<const T> logits, std::span<T> shares) {
  const T top = *std::max_element(logits.begin(), logits.end());
  if (top == -std::numeric_limits<T>::infinity()) {
    std::fill(shares.begin(), shares.end(), T{0});
    return;
  }
  T sum = 0;
  for (size_t i = 0; i < logits.size(); ++i)
    sum += shares[i] = std::exp(logits[i] - top) / (how == EPX_MOE_SIGMOID ? 1 + std::exp(logits[i]) : 1);
  for (T& share : shares)
    share /= sum;
}

// Divides the scores of these logits by their sum. Returns the sum, or 0 where it is so small that the shares are made of the
// logits.
template <typename T>
T divide_by_sum(epx_moe_score how, std::span<const T> logits, std::span<T> scores) {
  const T sum = std::accumulate(scores.begin(), scores.end(), T{0});
  if (sum < kSmallSum<T>) {
    shares_of_logits(how, logits, scores);
    return 0;
  }
  for (T& score : scores)
    score /= sum;
  return sum;
}

// The K weights of a token from the logits and the scores of its experts.
template <typename T>
void weigh(const epx_moe_router_config& config, std::span<const T> logits, std::span<const T> scores,
           std::span<T> weights) {
  if (config.score == EPX_MOE_TOPK_THEN_SOFTMAX) {
    softmax(logits, weights);
  } else {
    std::copy(scores.begin(), scores.end(), weights.begin());
    if (config.renormalize != 0) divide_by_sum(config.score, logits, weights);
  }
  for (T& weight : weights)
    weight *= static_cast<T>(config.scaling_factor);
}

template <typename T>
bool any_nan(std::span<const T> values) {
  return std::any_of(values.begin(), values.end(), [](T value) { return std::isnan(value); });
}

// Selects experts of one token at a time; its scratch is allocated once.
template <typename T>
class Selector {
public:
  Selector(const epx_moe_router_config& config, const T* selection_bias)
      : config_(config), bias_(selection_bias), scores_(config.num_experts), keys_(config.num_experts),
        group_scores_(config.num_groups), experts_(config.num_experts), groups_(config.num_groups),
        selected_logits_(config.top_k), selected_scores_(config.top_k) {}

  // False when the token is bad. experts() then mean nothing.
  bool select(std::span<const T> logits, std::span<T> weights) {
    if (any_nan(logits)) return false; // before anything is ordered by them
    score<T>(config_.score, logits, scores_);
    for (int e = 0; e < config_.num_experts; ++e)
      keys_[e] = bias_ != nullptr ? scores_[e] + bias_[e] : scores_[e];
    if (any_nan<T>(keys_)) return false;
    const std::span<int> candidates = config_.num_groups > 1 ? experts_of_best_groups() : all_experts();
    if (candidates.empty()) return false;
    order_best_first(candidates, config_.top_k, keys_);
    for (int k = 0; k < config_.top_k; ++k) {
      selected_logits_[k] = logits[experts_[k]];
      selected_scores_[k] = scores_[experts_[k]];
    }
    weigh<T>(config_, selected_logits_, selected_scores_, weights);
    return !any_nan<T>(weights);
  }

  std::span<const int> experts() const { return {experts_.data(), static_cast<size_t>(config_.top_k)}; }

private:
  // The best `count` of `items` to the front, ties by the lower index.
  static void order_best_first(std::span<int> items, int count, const std::vector<T>& keys) {
    std::partial_sort(items.begin(), items.begin() + count, items.end(),
                      [&](int a, int b) { return keys[a] > keys[b] || (keys[a] == keys[b] && a < b); });
  }

  std::span<int> all_experts() {
    std::iota(experts_.begin(), experts_.end(), 0);
    return experts_;
  }

  // Empty when a group's score is not a number.
  std::span<int> experts_of_best_groups() {
    const int64_t group_size = config_.num_experts / config_.num_groups;
    const int per_group = experts_in_group_score(config_);
    all_experts();
    for (int g = 0; g < config_.num_groups; ++g) {
      const std::span<int> members = std::span(experts_).subspan(g * group_size, group_size);
      order_best_first(members, per_group, keys_);
      group_scores_[g] = 0;
      for (int i = 0; i < per_group; ++i)
        group_scores_[g] += keys_[members[i]];
    }
    if (any_nan<T>(group_scores_)) return {};
    std::iota(groups_.begin(), groups_.end(), 0);
    order_best_first(groups_, config_.topk_groups, group_scores_);
    for (int i = 0; i < config_.topk_groups; ++i)
      std::iota(experts_.begin() + i * group_size, experts_.begin() + (i + 1) * group_size,
                groups_[i] * static_cast<int>(group_size));
    return std::span(experts_).first(config_.topk_groups * group_size);
  }

  const epx_moe_router_config& config_;
  const T* bias_;
  std::vector<T> scores_, keys_;                     // [E]
  std::vector<T> group_scores_;                      // [num_groups]
  std::vector<int> experts_;                         // [E]; the selected ones first
  std::vector<int> groups_;                          // [num_groups]
  std::vector<T> selected_logits_, selected_scores_; // [K]
};

// p[t, :] of the load-balance loss. Returns what divide_by_sum() does (1 for a softmax).
template <typename T>
T balance_probabilities(epx_moe_score how, std::span<const T> logits, std::span<T> p) {
  if (how != EPX_MOE_SIGMOID) {
    softmax(logits, p);
    return 1;
  }
  score(how, logits, p);
  return divide_by_sum(how, logits, p);
}

template <typename T>
T dot(std::span<const T> a, std::span<const T> b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), T{0});
}

// Gradients of one token, added up in the token's row of grad_logits.
template <typename T>
class Backward {
public:
  Backward(const epx_moe_router_config& config, const ExpertLoad* load, double aux_loss_grad)
      : config_(config), load_(load), aux_scale_(load != nullptr ? aux_scale(config, load->total()) * aux_loss_grad : 0),
        scores_(config.num_experts), grad_scores_(config.num_experts), selected_(config.top_k), shares_(config.top_k),
        grads_(config.top_k) {}

  void run(std::span<const T> logits, std::span<const int> experts, std::span<const T> grad_weights,
           std::span<T> grad_logits) {
    if (!grad_weights.empty()) through_weights(logits, experts, grad_weights, grad_logits);
    if (load_ != nullptr) through_balance(logits, grad_logits);
  }

private:
  void through_weights(std::span<const T> logits, std::span<const int> experts, std::span<const T> grad_weights,
                       std::span<T> grad_logits) {
    const int top_k = config_.top_k;
    for (int k = 0; k < top_k; ++k)
      grads_[k] = grad_weights[k] * static_cast<T>(config_.scaling_factor);
    for (int k = 0; k < top_k; ++k)
      selected_[k] = logits[experts[k]];
    if (config_.score == EPX_MOE_TOPK_THEN_SOFTMAX) {
      softmax<T>(selected_, shares_);
      return through_shares(logits, experts, grad_logits);
    }
    score<T>(config_.score, logits, scores_);
    if (config_.renormalize != 0) {
      T sum = 0;
      for (int k = 0; k < top_k; ++k)
        sum += scores_[experts[k]];
      if (sum < kSmallSum<T>) {
        shares_of_logits<T>(config_.score, selected_, shares_);
        return through_shares(logits, experts, grad_logits);
      }
      for (int k = 0; k < top_k; ++k)
        selected_[k] = scores_[experts[k]];
      const T mean = dot<T>(selected_, grads_) / sum;
      for (int k = 0; k < top_k; ++k)
        grads_[k] = (grads_[k] - mean) / sum;
    }
    std::fill(grad_scores_.begin(), grad_scores_.end(), T{0});
    for (int k = 0; k < top_k; ++k)
      grad_scores_[experts[k]] = grads_[k];
    through_scores(grad_logits);
  }

  // From grads_ to the logits, where the weights are shares_ of the selected logits.
  void through_shares(std::span<const T> logits, std::span<const int> experts, std::span<T> grad_logits) {
    const T mean = dot<T>(shares_, grads_);
    for (int k = 0; k < config_.top_k; ++k)
      grad_logits[experts[k]] += shares_[k] * (grads_[k] - mean) * derivative_of_log(logits[experts[k]]);
  }

  // By how much the logarithm of an expert's share grows with its logit while those of the others stay.
  T derivative_of_log(T logit) const { return config_.score == EPX_MOE_SIGMOID ? 1 - sigmoid(logit) : T{1}; }

  void through_balance(std::span<const T> logits, std::span<T> grad_logits) {
    const T sum = balance_probabilities<T>(config_.score, logits, scores_);
    for (int e = 0; e < config_.num_experts; ++e)
      grad_scores_[e] = static_cast<T>(aux_scale_ * load_->routes(e));
    if (config_.score == EPX_MOE_SIGMOID) {
      const T mean = dot<T>(scores_, grad_scores_);
      if (sum == 0) {
        for (int e = 0; e < config_.num_experts; ++e)
          grad_logits[e] += scores_[e] * (grad_scores_[e] - mean) * derivative_of_log(logits[e]);
        return;
      }
      for (int e = 0; e < config_.num_experts; ++e) {
        grad_scores_[e] = (grad_scores_[e] - mean) / sum;
        scores_[e] *= sum;
      }
    }
    through_scores(grad_logits);
  }

  // From scores_ and grad_scores_ to the logits, through the softmax over all experts or the sigmoids.
  void through_scores(std::span<T> grad_logits) {
    const bool is_softmax = config_.score != EPX_MOE_SIGMOID;
    const T mean = is_softmax ? dot<T>(scores_, grad_scores_) : 0;
    for (int e = 0; e < config_.num_experts; ++e)
      grad_logits[e] +=
          is_softmax ? scores_[e] * (grad_scores_[e] - mean) : scores_[e] * (1 - scores_[e]) * grad_scores_[e];
  }

  const epx_moe_router_config& config_;
  const ExpertLoad* load_;
  double aux_scale_;
  std::vector<T> scores_, grad_scores_;      // [E]
  std::vector<T> selected_, shares_, grads_; // [K]
};

} // namespace

template <typename T>
void route(const epx_moe_router_config& config, const epx_moe_router_args& args) {
  const int64_t top_k = config.top_k;
  const T* const logits = data_of<T>(args.logits);
  const auto* const mask = data_of<uint8_t>(args.token_mask);
  const Integers topk_idx(args.topk_idx);
  T* const topk_weights = data_of<T>(args.topk_weights);
  const auto experts = static_cast<size_t>(config.num_experts);
  int64_t info[3] = {0, 0, -1}; // masked tokens, bad tokens, the first of these
  Selector<T> selector(config, data_of<T>(args.selection_bias));
  for (int64_t t = 0; t < args.logits->sizes[0]; ++t) {
    const std::span<T> weights(topk_weights + t * top_k, static_cast<size_t>(top_k));
    const bool masked = mask != nullptr && mask[t] == 0;
    const bool good = !masked && selector.select({logits + t * config.num_experts, experts}, weights);
    if (!good) std::fill(weights.begin(), weights.end(), T{0});
    for (int64_t k = 0; k < top_k; ++k)
      topk_idx.set(t * top_k + k, good ? selector.experts()[k] : -1);
    info[0] += masked;
    if (!masked && !good && info[1]++ == 0) info[2] = t;
  }
  if (args.info != nullptr) std::copy_n(info, 3, data_of<int64_t>(args.info));
}

ExpertLoad::ExpertLoad(Integers counts_by_rank, int64_t num_ranks, int num_experts) : routes_(num_experts) {
  for (int64_t rank = 0; rank < num_ranks; ++rank)
    for (int e = 0; e < num_experts; ++e)
      routes_[e] += static_cast<double>(counts_by_rank[rank * num_experts + e]);
  for (const double routes : routes_)
    total_ += routes;
}

template <typename T>
void route_bwd(const epx_moe_router_config& config, const epx_moe_router_bwd_args& args, const ExpertLoad* load) {
  const int64_t num_tokens = args.logits->sizes[0];
  const int64_t experts = config.num_experts;
  const int64_t top_k = config.top_k;
  const T* const logits = data_of<T>(args.logits);
  const T* const grad_topk_weights = data_of<T>(args.grad_topk_weights);
  T* const grad_logits = data_of<T>(args.grad_logits);
  const Integers topk_idx(args.topk_idx);
  Backward<T> backward(config, load, args.aux_loss_grad);
  std::vector<int> selected(top_k);
  std::fill_n(grad_logits, num_tokens * experts, T{0});
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (topk_idx[t * top_k] < 0) continue; // masked or bad
    for (int64_t k = 0; k < top_k; ++k)
      selected[k] = static_cast<int>(topk_idx[t * top_k + k]);
    const std::span<const T> grad_weights = grad_topk_weights != nullptr
                                                ? std::span(grad_topk_weights + t * top_k, static_cast<size_t>(top_k))
                                                : std::span<const T>();
    backward.run({logits + t * experts, static_cast<size_t>(experts)}, selected, grad_weights,
                 {grad_logits + t * experts, static_cast<size_t>(experts)});
  }
}

template <typename T>
double aux_loss(const epx_moe_router_config& config, const epx_moe_aux_loss_args& args, const ExpertLoad& load) {
  const int64_t experts = config.num_experts;
  const T* const logits = data_of<T>(args.logits);
  const Integers topk_idx(args.topk_idx);
  std::vector<T> p(experts);
  double sum = 0;
  for (int64_t t = 0; t < args.logits->sizes[0]; ++t) {
    if (topk_idx[t * config.top_k] < 0) continue;
    balance_probabilities<T>(config.score, {logits + t * experts, static_cast<size_t>(experts)}, p);
    for (int e = 0; e < experts; ++e)
      sum += static_cast<double>(p[e]) * load.routes(e);
  }
  return aux_scale(config, load.total()) * sum;
}

template <typename T>
void update_bias(const ExpertLoad& load, double rate, int num_experts, T* selection_bias) {
  const double mean = load.total() / num_experts;
  for (int e = 0; e < num_experts; ++e)
    selection_bias[e] += bias_step(mean, load.routes(e), static_cast<T>(rate));
}

template void route<float>(const epx_moe_router_config&, const epx_moe_router_args&);
template void route<double>(const epx_moe_router_config&, const epx_moe_router_args&);
template void route_bwd<float>(const epx_moe_router_config&, const epx_moe_router_bwd_args&, const ExpertLoad*);
template void route_bwd<double>(const epx_moe_router_config&, const epx_moe_router_bwd_args&, const ExpertLoad*);
template double aux_loss<float>(const epx_moe_router_config&, const epx_moe_aux_loss_args&, const ExpertLoad&);
template double aux_loss<double>(const epx_moe_router_config&, const epx_moe_aux_loss_args&, const ExpertLoad&);
template void update_bias(const ExpertLoad&, double, int, float*);
template void update_bias(const ExpertLoad&, double, int, double*);

} // namespace epx::moe
