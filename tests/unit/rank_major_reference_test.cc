// SPDX-License-Identifier: Apache-2.0
// The rank-major oracle is compared with answers worked out by hand, and with the oracle of precision wire.
#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "runtime/reference/rank_major.h"
#include "tests/support/rng.h"
#include "tests/support/values.h"

using namespace epx::reference;

namespace {

Matrix float_column(const std::vector<float>& values) {
  const auto rows = static_cast<int64_t>(values.size());
  Matrix matrix{EPX_FLOAT32, rows, 1, std::vector<std::byte>(values.size() * sizeof(float))};
  for (int64_t row = 0; row < rows; ++row)
    store(matrix, row, 0, values[static_cast<size_t>(row)]);
  return matrix;
}

std::vector<float> floats_of_column(const Matrix& matrix) {
  std::vector<float> values;
  for (int64_t row = 0; row < matrix.rows; ++row)
    values.push_back(load(matrix, row, 0));
  return values;
}

} // namespace

TEST_CASE("rank-major: rows, experts, drops and gradients by hand") {
  // Four experts on two ranks; M is 2. Rank 0 has three tokens and rank 1 one.
  const Problem problem{4, 2, 1, 100, EPX_COMBINE_WIRE};
  const std::vector<Routing> routing = {{3, {0, 3, 1, 1, 7, 0}}, {1, {2, -1}}};
  const RankMajorPlan plan = plan_rank_major(problem, routing, 2);
  CHECK(plan.ranks[0].kept_to == std::vector<std::vector<int32_t>>{{0, 1}, {0}});
  CHECK(plan.ranks[1].kept_to == std::vector<std::vector<int32_t>>{{}, {0}});
  CHECK(plan.ranks[0].bad_indices == 1);
  CHECK(plan.ranks[0].dropped_here == 1); // token 2 of rank 0 has expert 0, and row 2
  CHECK(plan.ranks[1].dropped_here == 0);

  const std::vector<Matrix> tokens = {float_column({1, 2, 3}), float_column({4})};
  const std::vector<std::vector<float>> topk_weights = {{.1F, .2F, .3F, .4F, .5F, .6F}, {.7F, .8F}};
  std::vector<Matrix> recv = {float_column({9, 9, 9, 9}), float_column({9, 9, 9, 9})};
  std::vector<std::vector<int64_t>> experts(2, std::vector<int64_t>(8, 9)), counts(2, std::vector<int64_t>(2));
  std::vector<std::vector<float>> weights(2, std::vector<float>(8, 9));
  dispatch_rank_major(plan, {tokens, {}, topk_weights, recv, {}, experts, weights, counts});
  CHECK(floats_of_column(recv[0]) == std::vector<float>{1, 2, 9, 9});
  CHECK(floats_of_column(recv[1]) == std::vector<float>{1, 9, 4, 9});
  CHECK(experts[0] == std::vector<int64_t>{0, -1, 1, 1, 9, 9, 9, 9});
  CHECK(experts[1] == std::vector<int64_t>{-1, 1, 9, 9, 0, -1, 9, 9});
  CHECK(weights[0] == std::vector<float>{.1F, 0, .3F, .4F, 9, 9, 9, 9});
  CHECK(weights[1] == std::vector<float>{0, .2F, 9, 9, .7F, 0, 9, 9});
  CHECK(counts == std::vector<std::vector<int64_t>>{{2, 0}, {1, 1}});

  const std::vector<Matrix> rows = {float_column({10, 20, 99, 99}), float_column({5, 99, 7, 99})};
  std::vector<Matrix> out = {float_column({9, 9, 9}), float_column({9})};
  combine_rank_major(plan, rows, out);
  CHECK(floats_of_column(out[0]) == std::vector<float>{15, 20, 0});
  CHECK(floats_of_column(out[1]) == std::vector<float>{7});

  std::vector<std::vector<float>> grads = {std::vector<float>(6, 9), std::vector<float>(2, 9)};
  const std::vector<std::vector<float>> row_grads = {{1, 2, 3, 4, 5, 6, 7, 8}, {11, 12, 13, 14, 15, 16, 17, 18}};
  dispatch_rank_major_bwd(plan, {rows, row_grads, out, grads});
  CHECK(grads[0] == std::vector<float>{1, 12, 3, 4, 0, 0});
  CHECK(grads[1] == std::vector<float>{15, 0});

  std::vector<Matrix> grad_rows = recv;
  combine_rank_major_bwd(plan, tokens, grad_rows);
  CHECK(floats_of_column(grad_rows[0]) == floats_of_column(recv[0]));
  CHECK(floats_of_column(grad_rows[1]) == floats_of_column(recv[1]));
}

TEST_CASE("rank-major: in a compact plan the rows of the sources follow each other") {
  const Problem problem{4, 1, 1, 100, EPX_COMBINE_WIRE};
  // Of rank 0's tokens the first and the last go to rank 1, of rank 1's the second; the others go to rank 0.
  const std::vector<Routing> routing = {{3, {2, 0, 3}}, {2, {1, 2}}};
  const RankMajorPlan plan = plan_rank_major(problem, routing, 3, true);
  const std::vector<Matrix> tokens = {float_column({1, 2, 3}), float_column({4, 5})};
  const std::vector<std::vector<float>> weights = {{10, 20, 30}, {40, 50}};
  std::vector<Matrix> recv(2, float_column({9, 9, 9, 9, 9, 9}));
  std::vector<std::vector<int64_t>> recv_topk_idx(2, std::vector<int64_t>(6, 9)), counts(2, std::vector<int64_t>(2));
  std::vector<std::vector<float>> recv_weights(2, std::vector<float>(6, 9));
  dispatch_rank_major(plan, {tokens, {}, weights, recv, {}, recv_topk_idx, recv_weights, counts});
  CHECK(counts == std::vector<std::vector<int64_t>>{{1, 1}, {2, 1}});
  CHECK(floats_of_column(recv[0]) == std::vector<float>{2, 4, 9, 9, 9, 9});
  CHECK(floats_of_column(recv[1]) == std::vector<float>{1, 3, 5, 9, 9, 9});
  CHECK(recv_topk_idx[1] == std::vector<int64_t>{0, 1, 0, 9, 9, 9});
  CHECK(recv_weights[1] == std::vector<float>{10, 30, 50, 9, 9, 9});

  std::vector<Matrix> out = {float_column({9, 9, 9}), float_column({9, 9})};
  combine_rank_major(plan, recv, out);
  CHECK(floats_of_column(out[0]) == std::vector<float>{1, 2, 3});
  CHECK(floats_of_column(out[1]) == std::vector<float>{4, 5});
  std::vector<std::vector<float>> grads = {std::vector<float>(3), std::vector<float>(2)};
  dispatch_rank_major_bwd(plan, {recv, recv_weights, out, grads});
  CHECK(grads == weights);
  std::vector<Matrix> grad_rows(2, float_column({9, 9, 9, 9, 9, 9}));
  combine_rank_major_bwd(plan, tokens, grad_rows);
  CHECK(floats_of_column(grad_rows[0]) == floats_of_column(recv[0]));
  CHECK(floats_of_column(grad_rows[1]) == floats_of_column(recv[1]));
}

TEST_CASE("rank-major: rows that the caller has summed yield the bits of precision wire") {
  for (const epx_dtype dtype : {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16}) {
    epx::test::Rng rng(static_cast<uint64_t>(dtype));
    constexpr int kRanks = 3, kTopK = 5, kHidden = 40;
    const Problem problem{7, kTopK, 1, 1000, EPX_COMBINE_WIRE};
    std::vector<Routing> routing;
    for (const int64_t tokens : {20, 0, 13}) {
      routing.push_back({tokens, {}});
      for (int64_t route = 0; route < tokens * kTopK; ++route)
        routing.back().topk_idx.push_back(rng.below(8) - 1);
    }
    const Plan plan = prepare(problem, routing);
    const RankMajorPlan rank_major = plan_rank_major(problem, routing, 20);
    std::vector<Matrix> expert_out, rows, wire, out;
    std::vector<std::vector<float>> weights;
    for (int rank = 0; rank < kRanks; ++rank) {
      expert_out.push_back(epx::test::random_rows(dtype, plan.ranks[rank].offsets.back(), kHidden, rng));
      weights.push_back(epx::test::random_weights(plan.ranks[rank].offsets.back(), rng));
      rows.push_back(epx::test::scribbled_rows(dtype, kRanks * 20, kHidden));
      wire.push_back(epx::test::scribbled_rows(dtype, routing[rank].num_tokens, kHidden));
      out.push_back(wire.back());
    }
    combine(plan, {expert_out, weights, wire});
    for (int source = 0; source < kRanks; ++source)
      for (int rank = 0; rank < kRanks; ++rank)
        for (size_t i = 0; i < rank_major.ranks[source].kept_to[rank].size(); ++i)
          for (int64_t h = 0; h < kHidden; ++h) {
            float acc = 0.0F;
            for (int k = 0; k < kTopK; ++k) {
              const int64_t route = int64_t{rank_major.ranks[source].kept_to[rank][i]} * kTopK + k;
              if (plan.ranks[source].expert_rank[route] != rank) continue;
              const int32_t slot = plan.ranks[source].slot[route];
              acc = std::fma(weights[rank][slot], load(expert_out[rank], slot, h), acc);
            }
            store(rows[rank], source * 20 + static_cast<int64_t>(i), h, acc);
          }
    combine_rank_major(rank_major, rows, out);
    for (int rank = 0; rank < kRanks; ++rank)
      CHECK(count_wrong(wire[rank], out[rank], true) == 0);
  }
}
