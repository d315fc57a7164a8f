// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/workload/routing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/workload/random.h"
#include "tools/ep_bench/workload/text_file.h"

namespace epx::bench {
namespace {

// First key words of the streams, so that no two purposes share numbers.
enum : uint64_t {
  kUniform = 0x756e6966,
  kZipf = 0x7a697066,
  kZipfOrder = 0x6f726472,
  kWordHash = 0x776f7264,
  kHot = 0x686f74
};

RandomStream stream_of(uint64_t purpose, uint64_t seed, int set, int rank) {
  return {purpose, seed, static_cast<uint64_t>(set), static_cast<uint64_t>(rank)};
}

// FNV-1a, 64 bits.
uint64_t fingerprint(std::string_view word) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : word)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

} // namespace

int32_t hash_expert(std::string_view word, uint64_t seed, int k, int32_t num_experts) {
  const RandomStream hashes{kWordHash, seed, fingerprint(word)};
  return static_cast<int32_t>(hashes.below(static_cast<uint64_t>(k), static_cast<uint32_t>(num_experts)));
}

std::vector<std::string> read_words(const std::string& file) {
  std::istringstream text(read_text(file, fmt::format("'{}' of --routing text", file)));
  const std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
  if (words.empty()) throw UsageError(fmt::format("'{}' of --routing text has no words", file));
  return words;
}

std::vector<int64_t> uniform_routing(const RoutingShape& shape, int set, int rank) {
  const RandomStream random = stream_of(kUniform, shape.seed, set, rank);
  std::vector<int64_t> topk_idx;
  topk_idx.reserve(static_cast<size_t>(shape.tokens) * shape.top_k);
  // The first K steps of a Fisher-Yates shuffle, undone afterwards: the cost does not grow with E.
  std::vector<int32_t> experts(shape.experts);
  std::iota(experts.begin(), experts.end(), 0);
  std::array<uint32_t, 64> swapped{};
  for (int64_t token = 0; token < shape.tokens; ++token) {
    for (int k = 0; k < shape.top_k; ++k) {
      const auto left = static_cast<uint32_t>(shape.experts - k);
      swapped[k] = k + random.below(token * shape.top_k + k, left);
      std::swap(experts[k], experts[swapped[k]]);
      topk_idx.push_back(experts[k]);
    }
    for (int k = shape.top_k; k-- > 0;)
      std::swap(experts[k], experts[swapped[k]]);
  }
  return topk_idx;
}

std::vector<int32_t> zipf_order(uint64_t seed, int32_t experts) {
  const RandomStream random{kZipfOrder, seed};
  std::vector<int32_t> order(experts);
  std::iota(order.begin(), order.end(), 0);
  for (int32_t i = experts; i-- > 1;)
    std::swap(order[i], order[random.below(i, i + 1)]);
  return order;
}

std::vector<int64_t> zipf_routing(const RoutingShape& shape, double exponent, int set, int rank) {
  const RandomStream random = stream_of(kZipf, shape.seed, set, rank);
  const std::vector<int32_t> order = zipf_order(shape.seed, shape.experts);
  std::vector<double> log_weight(shape.experts);
  for (int32_t n = 0; n < shape.experts; ++n)
    log_weight[n] = -exponent * std::log(n + 1.0);

  // Gumbel-top-K: the K largest of log weight + Gumbel noise, in falling order, are K draws without replacement; unlike
  // redrawing duplicates it takes the same time for every exponent.
  std::vector<int64_t> topk_idx;
  topk_idx.reserve(static_cast<size_t>(shape.tokens) * shape.top_k);
  std::vector<std::pair<double, int32_t>> keys(shape.experts);
  for (int64_t token = 0; token < shape.tokens; ++token) {
    for (int32_t n = 0; n < shape.experts; ++n) {
      const double u = random.unit(token * shape.experts + n) + 0x1p-54; // in (0, 1)
      keys[n] = {log_weight[n] - std::log(-std::log(u)), n};
    }
    std::partial_sort(keys.begin(), keys.begin() + shape.top_k, keys.end(), std::greater<>());
    for (int k = 0; k < shape.top_k; ++k)
      topk_idx.push_back(order[keys[k].second]);
  }
  return topk_idx;
}

std::vector<int64_t> hot_routing(const RoutingShape& shape, double fraction, int set, int rank) {
  const RandomStream random = stream_of(kHot, shape.seed, set, rank);
  const int32_t hot = hot_expert(shape.seed, shape.experts);
  // Uniform over the other E - 1 experts, which are numbered without it; then the first place goes to it.
  RoutingShape others = shape;
  --others.experts;
  std::vector<int64_t> topk_idx = uniform_routing(others, set, rank);
  for (int64_t& expert : topk_idx)
    expert += expert >= hot ? 1 : 0;
  for (int64_t token = 0; token < shape.tokens; ++token)
    if (random.unit(token) < fraction) topk_idx[token * shape.top_k] = hot;
  return topk_idx;
}

int32_t hot_expert(uint64_t seed, int32_t experts) {
  return static_cast<int32_t>(RandomStream{kHot, seed}.below(0, static_cast<uint32_t>(experts)));
}

std::vector<int64_t> text_routing(const RoutingShape& shape, std::span<const std::string> words, int set, int rank,
                                  int num_ranks) {
  std::vector<int64_t> topk_idx;
  topk_idx.reserve(static_cast<size_t>(shape.tokens) * shape.top_k);
  const uint64_t first = (static_cast<uint64_t>(set) * num_ranks + rank) * shape.tokens;
  for (int64_t token = 0; token < shape.tokens; ++token) {
    const std::string& word = words[(first + token) % words.size()];
    for (int k = 0; k < shape.top_k; ++k)
      topk_idx.push_back(hash_expert(word, shape.seed, k, shape.experts));
  }
  return topk_idx;
}

} // namespace epx::bench
