// SPDX-License-Identifier: Apache-2.0
// The local permutation on CUDA: the bits that epx_moe.h promises, in every dtype and in shapes that reach every kernel.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/permute_run.h"

namespace epx::test {
namespace {

// A row map with the rows of random routes, of which some are none; all routes may have one expert.
RowMap<int32_t> random_map(int64_t num_tokens, int64_t top_k, Rng& rng) {
  const int64_t num_experts = rng.pick<int64_t>({1, 7, 300, 600});
  const bool is_hot = rng.chance(20);
  Tensor<int32_t> topk_idx({num_tokens, top_k});
  for (int64_t i = 0; i < topk_idx.count(); ++i)
    topk_idx[i] = static_cast<int32_t>(rng.chance(15) ? -1 : is_hot ? num_experts - 1 : rng.below(num_experts));
  const auto alignment = rng.pick<int32_t>({0, 1, 4, 16});
  const auto map = run_row_map(topk_idx, num_experts, alignment);
  const OnHost host;
  const auto expected = run_row_map(topk_idx, num_experts, alignment);
  if (const std::string wrong = difference(map.row_map, expected.row_map) + difference(map.counts, expected.counts) +
                                difference(map.offsets, expected.offsets);
      !wrong.empty())
    throw std::runtime_error(wrong);
  return map;
}

// What epx_moe.h says, in float, with one rounding.
template <typename T>
Tensor<T> expected_sum(const Tensor<int32_t>& row_map, const Tensor<T>& rows, const Tensor<float>* weights) {
  Tensor<T> tokens({row_map.size(0), rows.size(1)});
  for (int64_t t = 0; t < tokens.size(0); ++t) {
    for (int64_t h = 0; h < tokens.size(1); ++h) {
      float acc = 0;
      for (int64_t k = 0; k < row_map.size(1); ++k)
        if (const int64_t row = row_map(t, k); row >= 0)
          acc = std::fma(weights != nullptr ? (*weights)(t, k) : 1.0f, static_cast<float>(rows(row, h)), acc);
      tokens(t, h) = T(acc);
    }
  }
  return tokens;
}

template <typename T>
Gradients<T> expected_unpermute_bwd(const Tensor<int32_t>& row_map, const Tensor<T>& grad_tokens, const Tensor<T>& rows,
                                    const Tensor<float>* weights) {
  Gradients<T> gradients = {Tensor<T>({rows.size(0), rows.size(1)}), Tensor<float>({row_map.size(0), row_map.size(1)})};
  for (int64_t t = 0; t < row_map.size(0); ++t) {
    for (int64_t k = 0; k < row_map.size(1); ++k) {
      const int64_t row = row_map(t, k);
      if (row < 0) continue;
      std::vector<float> acc(256);
      for (int64_t h = 0; h < rows.size(1); ++h) {
        const T grad = grad_tokens(t, h);
        float& sum = acc[static_cast<size_t>(h % 256)];
        sum = std::fma(static_cast<float>(grad), static_cast<float>(rows(row, h)), sum);
        gradients.of_rows(row, h) = weights != nullptr ? T((*weights)(t, k) * static_cast<float>(grad)) : grad;
      }
      for (size_t left = 128; left > 0; left /= 2)
        for (size_t i = 0; i < left; ++i)
          acc[i] = acc[2 * i] + acc[2 * i + 1];
      gradients.of_topk_weights(t, k) = acc[0];
    }
  }
  return gradients;
}

// Returns what is wrong with the movements of one random case.
template <typename T>
std::string movement_fault(uint64_t seed) {
  Rng rng(mix(seed, 0x90f3));
  const int64_t num_tokens = rng.between(0, 24);
  const int64_t hidden = rng.pick<int64_t>({1, 3, 8, 31, 64, 257, 1024, 1100, 2056});
  const int64_t top_k = rng.chance(10) ? rng.between(33, 64) : rng.between(1, 8);
  const auto map = random_map(num_tokens, top_k, rng);
  const int64_t num_rows = map.num_rows() + rng.below(40);
  const auto tokens = converted<T>(random_tensor<float>({num_tokens, hidden}, rng, -3, 3));
  const auto weights = random_tensor<float>({num_tokens, top_k}, rng, -2, 2);
  const auto row_weights = random_tensor<float>({num_rows}, rng);
  Tensor<T> rows = converted<T>(random_tensor<float>({num_rows, hidden}, rng, -3, 3));
  Tensor<T> scattered({num_rows, hidden});
  Tensor<float> scattered_weights({num_rows}), gathered_weights({num_tokens, top_k});
  for (int64_t route = 0; route < map.row_map.count(); ++route) {
    const int64_t row = map.row_map[route];
    if (row < 0) continue;
    scattered_weights[row] = weights[route];
    gathered_weights[route] = row_weights[row];
    for (int64_t h = 0; h < hidden; ++h)
      scattered(row, h) = tokens(route / top_k, h);
  }
  for (int64_t row = 0; row < num_rows; ++row) { // a row that no route maps to is never read
    if (std::find(map.row_map.begin(), map.row_map.end(), row) != map.row_map.end()) continue;
    for (int64_t h = 0; h < hidden; ++h)
      rows(row, h) = T(std::nan(""));
  }

  std::string wrong;
  const auto expect = [&](const char* what, const auto& actual, const auto& expected) {
    if (const std::string found = difference(actual, expected); !found.empty())
      wrong += std::string(what) + ": " + found + ". ";
  };
  const auto permuted = run_permute(map.row_map, tokens, num_rows, &weights);
  expect("permute", permuted.rows, scattered);
  expect("permute's weights", permuted.row_weights, scattered_weights);
  const auto sums = expected_sum<T>(map.row_map, rows, nullptr);
  const auto gradients = run_permute_bwd(map.row_map, rows, &row_weights);
  expect("permute_bwd", gradients.of_rows, sums);
  expect("permute_bwd's weights", gradients.of_topk_weights, gathered_weights);
  expect("unpermute", run_unpermute(map.row_map, rows), sums);
  expect("unpermute, weighted", run_unpermute(map.row_map, rows, &weights), expected_sum(map.row_map, rows, &weights));
  for (const bool weighted : {false, true}) {
    const auto* const given = weighted ? &weights : nullptr;
    const auto expected = expected_unpermute_bwd(map.row_map, tokens, rows, given);
    const auto actual = run_unpermute_bwd(map.row_map, tokens, rows, given, true);
    expect("unpermute_bwd", actual.of_rows, expected.of_rows);
    expect("unpermute_bwd's weights", actual.of_topk_weights, expected.of_topk_weights);
    expect("unpermute_bwd alone", run_unpermute_bwd(map.row_map, tokens, rows, given, false).of_rows, expected.of_rows);
  }
  if constexpr (std::is_same_v<T, float>) {
    const OnHost host;
    const auto on_host = run_unpermute_bwd(map.row_map, tokens, rows, &weights, true);
    const auto expected = expected_unpermute_bwd(map.row_map, tokens, rows, &weights);
    expect("the host's unpermute_bwd", on_host.of_rows, expected.of_rows);
    expect("the host's unpermute_bwd's weights", on_host.of_topk_weights, expected.of_topk_weights);
    expect("the host's unpermute", run_unpermute(map.row_map, rows), sums);
    expect("the host's permute", run_permute(map.row_map, tokens, num_rows).rows, scattered);
  }
  return wrong;
}

TEST_CASE("random permutations have the bits of the contract, and float32 those of the host") {
  for (uint64_t seed = 0; seed < 10 * num_cases(50); ++seed) {
    const std::string wrong = seed % 3 == 0   ? movement_fault<float>(seed)
                              : seed % 3 == 1 ? movement_fault<Bfloat16>(seed)
                                              : movement_fault<Float16>(seed);
    if (!wrong.empty()) FAIL_CHECK("seed " << seed << ": " << wrong);
  }
}

TEST_CASE("500 random row maps are those of the host") {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x5047));
    random_map(rng.chance(5) ? rng.between(300, 600) : rng.between(0, 40), rng.between(1, 16), rng);
  }
}

TEST_CASE("tensors that are aligned to their elements only") {
  Rng rng(72);
  const auto map = run_row_map(Tensor<int32_t>({3, 2}, {0, 1, 1, 0, -1, 1}), 2, 1);
  const auto tokens = random_tensor<float>({3, 64}, rng);
  const auto expected = run_permute(map.row_map, tokens, 5).rows;
  Tensor<float> storage({1 + 3 * 64}), rows_storage({1 + 5 * 64});
  std::copy(tokens.begin(), tokens.end(), &storage[1]);
  const epx_tensor shifted = epx_tensor_2d(address_for_call(&storage[1]), EPX_FLOAT32, 3, 64);
  const epx_tensor rows = epx_tensor_2d(address_for_call(&rows_storage[1]), EPX_FLOAT32, 5, 64);
  epx_moe_permute_args args = {sizeof(args), nullptr, map.row_map.get(), &shifted, nullptr, &rows, nullptr, EPX_PADS_ZERO};
  args.cuda = place_of_call(epx_moe_permute_workspace, &args);
  require_ok(epx_moe_permute(&args), "epx_moe_permute");
  finish_call();
  CHECK(std::equal(expected.begin(), expected.end(), &rows_storage[1]));

  const auto sums = run_unpermute(map.row_map, expected);
  epx_moe_unpermute_args back = {sizeof(back), place_of_call(), map.row_map.get(), &rows, nullptr, &shifted};
  require_ok(epx_moe_unpermute(&back), "epx_moe_unpermute");
  finish_call();
  CHECK(std::equal(sums.begin(), sums.end(), &storage[1]));
}

} // namespace
} // namespace epx::test
