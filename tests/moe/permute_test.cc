// SPDX-License-Identifier: Apache-2.0
// The local permutation is compared: row maps with an oracle, rows bit for bit, gradients with finite differences.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/permute_run.h"

namespace epx::test {
namespace {

template <typename Index>
Tensor<Index> random_indices(int64_t num_tokens, int64_t top_k, int64_t num_experts, Rng& rng) {
  Tensor<Index> topk_idx({num_tokens, top_k});
  const int64_t hot = rng.below(num_experts); // some experts get no token, one gets many
  for (int64_t i = 0; i < topk_idx.count(); ++i)
    topk_idx[i] = static_cast<Index>(rng.chance(15) ? -1 : rng.chance(40) ? hot : rng.below(num_experts));
  return topk_idx;
}

// Walks the experts, and for each the routes in order.
template <typename Index>
RowMap<int64_t> naive_row_map(const Tensor<Index>& topk_idx, int64_t num_experts, int32_t alignment) {
  RowMap<int64_t> map = {Tensor<int64_t>({num_experts}), Tensor<int64_t>({num_experts + 1}),
                         Tensor<int32_t>({topk_idx.size(0), topk_idx.size(1)}, -1)};
  int32_t row = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    map.offsets[expert] = row;
    for (int64_t route = 0; route < topk_idx.count(); ++route) {
      if (topk_idx[route] != expert) continue;
      map.row_map[route] = row++;
      ++map.counts[expert];
    }
    while (alignment > 0 && row % alignment != 0)
      ++row;
  }
  map.offsets[num_experts] = row;
  return map;
}

template <typename Index, typename Count>
std::string row_map_fault(uint64_t seed) {
  Rng rng(mix(seed, 0x40a9));
  const int64_t num_experts = rng.between(1, 12);
  const auto alignment = rng.pick<int32_t>({0, 1, 4, 16});
  const auto topk_idx = random_indices<Index>(rng.between(0, 20), rng.between(1, 8), num_experts, rng);
  const auto expected = naive_row_map(topk_idx, num_experts, alignment);
  const auto actual = run_row_map<Index, Count>(topk_idx, num_experts, alignment);
  std::string wrong = difference(actual.row_map, expected.row_map);
  if (wrong.empty()) wrong = difference(actual.counts, converted<Count>(expected.counts));
  if (wrong.empty()) wrong = difference(actual.offsets, converted<Count>(expected.offsets));
  return wrong;
}

TEST_CASE("row maps of random cases") {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const std::string wrong = seed % 3 == 0   ? row_map_fault<int32_t, int32_t>(seed)
                              : seed % 3 == 1 ? row_map_fault<int64_t, int64_t>(seed)
                                              : row_map_fault<int64_t, int32_t>(seed);
    if (!wrong.empty()) FAIL_CHECK("seed " << seed << ": " << wrong);
  }
  CHECK(run_row_map(Tensor<int32_t>({2, 2}, {1, 0, 1, 1}), 3, 4).num_rows() == 8); // closed form
}

// Elements are random bit patterns, and so NaNs with payloads too.
template <typename T>
Tensor<T> random_bits(std::initializer_list<int64_t> shape, Rng& rng) {
  Tensor<T> tensor(shape);
  for (int64_t i = 0; i < tensor.count(); ++i) {
    const uint64_t bits = rng.next();
    std::memcpy(&tensor[i], &bits, sizeof(T));
  }
  return tensor;
}

template <typename T, typename Weight>
std::string permute_fault(int64_t hidden) {
  Rng rng(mix(static_cast<uint64_t>(hidden), 0x9e43));
  const auto map = run_row_map(random_indices<int32_t>(9, 3, 5, rng), 5, 4);
  auto tokens = random_bits<T>({9, hidden}, rng);
  std::memset(&tokens[0], 0xff, sizeof(T)); // makes sure that there is a NaN
  const auto topk_weights = random_bits<Weight>({9, 3}, rng);
  const int64_t num_rows = map.num_rows() + 2;
  Tensor<T> rows({num_rows, hidden});
  Tensor<Weight> row_weights({num_rows});
  for (int64_t route = 0; route < map.row_map.count(); ++route) {
    const int64_t row = map.row_map[route];
    if (row < 0) continue;
    row_weights[row] = topk_weights[route];
    for (int64_t h = 0; h < hidden; ++h)
      rows(row, h) = tokens(route / 3, h);
  }
  const auto permuted = run_permute(map.row_map, tokens, num_rows, &topk_weights);
  std::string wrong = difference(permuted.rows, rows);
  if (wrong.empty()) wrong = difference(permuted.row_weights, row_weights);
  if (wrong.empty()) wrong = difference(run_permute(map.row_map, tokens, num_rows).rows, rows);
  auto untouched_rows = scribbled<T>({num_rows, hidden});
  auto untouched_weights = scribbled<Weight>({num_rows});
  for (int64_t route = 0; route < map.row_map.count(); ++route) {
    const int64_t row = map.row_map[route];
    if (row < 0) continue;
    for (int64_t h = 0; h < hidden; ++h)
      untouched_rows(row, h) = rows(row, h);
    untouched_weights[row] = row_weights[row];
  }
  const auto others_untouched = run_permute(map.row_map, tokens, num_rows, &topk_weights, EPX_PADS_UNTOUCHED);
  if (wrong.empty()) wrong = difference(others_untouched.rows, untouched_rows);
  if (wrong.empty()) wrong = difference(others_untouched.row_weights, untouched_weights);
  return wrong;
}

TEST_CASE("permute copies any dtype bit for bit, and clears rows that no route maps to unless they are to stay") {
  for (const int64_t hidden : {1, 7, 33}) {
    CAPTURE(hidden);
    CHECK(permute_fault<uint16_t, float>(hidden) == "");
    CHECK(permute_fault<float, uint16_t>(hidden) == "");
    CHECK(permute_fault<double, double>(hidden) == "");
    CHECK(permute_fault<uint8_t, int64_t>(hidden) == "");
  }
}

// This is the contract's formula; rows that no route maps to hold NaN.
template <typename Real>
std::string unpermute_fault(int64_t hidden, bool weighted) {
  Rng rng(mix(static_cast<uint64_t>(hidden), weighted));
  const auto map = run_row_map(random_indices<int32_t>(11, 4, 6, rng), 6, 4);
  const auto topk_weights = random_tensor<Real>({11, 4}, rng, -2, 2);
  Tensor<Real> rows({map.num_rows() + 3, hidden}, std::numeric_limits<Real>::quiet_NaN());
  Tensor<Real> expected({11, hidden});
  for (int64_t route = 0; route < map.row_map.count(); ++route) {
    for (int64_t h = 0; h < hidden && map.row_map[route] >= 0; ++h) {
      Real& x = rows(map.row_map[route], h);
      x = static_cast<Real>(uniform(rng, -3, 3));
      Real& acc = expected(route / 4, h);
      acc = std::fma(weighted ? topk_weights[route] : Real{1}, x, acc);
    }
  }
  return difference(run_unpermute(map.row_map, rows, weighted ? &topk_weights : nullptr), expected);
}

TEST_CASE("unpermute adds with fma in k order and reads no other row") {
  for (const int64_t hidden : {1, 7, 33, 130}) {
    for (const bool weighted : {false, true}) {
      CAPTURE(hidden);
      CAPTURE(weighted);
      CHECK(unpermute_fault<float>(hidden, weighted) == "");
      if (!on_cuda()) CHECK(unpermute_fault<double>(hidden, weighted) == "");
    }
  }
}

TEST_CASE("unpermute undoes permute") {
  Rng rng(31);
  Tensor<int32_t> topk_idx({8, 1});
  for (int64_t t = 0; t < 8; ++t)
    topk_idx[t] = static_cast<int32_t>(rng.below(5));
  const auto one = run_row_map(topk_idx, 5, 4);
  const auto tokens = random_tensor<float>({8, 19}, rng);
  CHECK(difference(run_unpermute(one.row_map, run_permute(one.row_map, tokens, one.num_rows()).rows), tokens) == "");

  const Tensor<int32_t> twice({2, 3}, {0, 4, 4, 2, 1, 0}); // duplicates are routes of their own
  const auto three = run_row_map(twice, 5, 16);
  const Tensor<float> whole({2, 2}, {1, -2, 3, 0.5f});
  const auto sum = run_unpermute(three.row_map, run_permute(three.row_map, whole, three.num_rows()).rows);
  CHECK(difference(sum, Tensor<float>({2, 2}, {3, -6, 9, 1.5f})) == "");
}

TEST_CASE("no tokens and no rows") {
  const auto map = run_row_map(Tensor<int64_t>({0, 2}), 3, 4);
  CHECK(map.num_rows() == 0);
  CHECK(run_permute(map.row_map, Tensor<float>({0, 4}), 0).rows.count() == 0);
  const auto rows = run_permute(map.row_map, Tensor<float>({0, 4}), 2).rows;
  CHECK(difference(rows, Tensor<float>({2, 4})) == "");
  const Tensor<int32_t> none({2, 1}, -1);
  CHECK(difference(run_unpermute(none, Tensor<double>({0, 3})), Tensor<double>({2, 3})) == "");
}

// Six tokens of K = 2 over 4 experts in zones of 4 rows; expert 1 has no tokens.
struct GradientCase {
  Rng rng{32};
  RowMap<int32_t> map = run_row_map(Tensor<int32_t>({6, 2}, {0, 2, 3, -1, 2, 2, -1, -1, 0, 3, 3, 0}), 4, 4);
  int64_t num_rows = map.num_rows() + 1;
  Tensor<double> tokens = random_tensor<double>({6, 5}, rng);
  Tensor<double> rows = random_tensor<double>({num_rows, 5}, rng);
  Tensor<double> topk_weights = random_tensor<double>({6, 2}, rng);
  Tensor<double> row_cotangent = random_tensor<double>({num_rows, 5}, rng);
  Tensor<double> weight_cotangent = random_tensor<double>({num_rows}, rng);
  Tensor<double> token_cotangent = random_tensor<double>({6, 5}, rng);
};

TEST_CASE("gradients of permute") {
  GradientCase c;
  const auto gradients = run_permute_bwd(c.map.row_map, c.row_cotangent, &c.weight_cotangent);
  const auto value = [&] {
    const auto permuted = run_permute(c.map.row_map, c.tokens, c.num_rows, &c.topk_weights);
    return dot(permuted.rows, c.row_cotangent) + dot(permuted.row_weights, c.weight_cotangent);
  };
  check_gradient(value, c.tokens, gradients.of_rows, "tokens");
  check_gradient(value, c.topk_weights, gradients.of_topk_weights, "topk_weights");
  for (int64_t route = 0; route < 12; ++route) {
    if (c.map.row_map[route] < 0) CHECK(gradients.of_topk_weights[route] == 0);
  }

  const auto alone = run_permute_bwd(c.map.row_map, c.row_cotangent).of_rows;
  CHECK(difference(alone, gradients.of_rows) == "");
  CHECK(difference(alone, run_unpermute(c.map.row_map, c.row_cotangent)) == "");
}

TEST_CASE("gradients of unpermute") {
  for (const bool weighted : {false, true}) {
    CAPTURE(weighted);
    GradientCase c;
    const auto gradients =
        run_unpermute_bwd(c.map.row_map, c.token_cotangent, c.rows, weighted ? &c.topk_weights : nullptr, weighted);
    const auto value = [&] {
      return dot(run_unpermute(c.map.row_map, c.rows, weighted ? &c.topk_weights : nullptr), c.token_cotangent);
    };
    check_gradient(value, c.rows, gradients.of_rows, "rows");
    if (weighted) check_gradient(value, c.topk_weights, gradients.of_topk_weights, "topk_weights");
  }
}

TEST_CASE("the gradient of a weight is summed as epx_combine_bwd sums") {
  constexpr int64_t kHidden = 300;
  Rng rng(33);
  const Tensor<int32_t> row_map({1, 1}, 0);
  const auto grad_tokens = random_tensor<float>({1, kHidden}, rng);
  const auto rows = random_tensor<float>({1, kHidden}, rng);
  std::vector<float> acc(256);
  for (int64_t h = 0; h < kHidden; ++h) {
    float& lane = acc[static_cast<size_t>(h % 256)];
    lane = std::fma(grad_tokens[h], rows[h], lane);
  }
  for (size_t lanes = 128; lanes > 0; lanes /= 2) {
    for (size_t i = 0; i < lanes; ++i)
      acc[i] = acc[2 * i] + acc[2 * i + 1];
  }
  const auto gradients = run_unpermute_bwd(row_map, grad_tokens, rows, nullptr, true);
  CHECK(difference(gradients.of_topk_weights, Tensor<float>({1, 1}, acc[0])) == "");
  CHECK(difference(gradients.of_rows, grad_tokens) == "");
}

TEST_CASE("the gradient of a weight keeps the sign of zero") { // absent elements take no step, which would make it +0
  const Tensor<float> grad_tokens({1, 300}, -1e-30f);
  const Tensor<float> rows({1, 300}, 1e-30f);
  const auto gradients = run_unpermute_bwd(Tensor<int32_t>({1, 1}, 0), grad_tokens, rows, nullptr, true);
  CHECK(difference(gradients.of_topk_weights, Tensor<float>({1, 1}, -0.0f)) == "");
}

} // namespace
} // namespace epx::test
