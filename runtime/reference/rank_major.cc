// SPDX-License-Identifier: Apache-2.0
#include "runtime/reference/rank_major.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "base/dtypes.h"
#include "runtime/reference/formats.h"

namespace epx::reference {
namespace {

void require_that(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

int rank_of_expert(const RankMajorPlan& plan, int64_t expert) {
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    const RankMajorRank& owner = plan.ranks[rank];
    if (expert >= owner.first_local_expert && expert < owner.first_local_expert + owner.num_local_experts)
      return static_cast<int>(rank);
  }
  throw std::invalid_argument("an expert that no rank owns");
}

// The rank that a route goes to; -1 where it is masked.
int rank_of_route(const RankMajorPlan& plan, size_t source, int64_t token, int k) {
  const int64_t expert = plan.ranks[source].topk_idx[token * plan.problem.top_k + k];
  return expert < 0 ? -1 : rank_of_expert(plan, expert);
}

// The row of a receiver's tensors where the rows of a source begin.
int64_t first_row(const RankMajorPlan& plan, size_t receiver, size_t source) {
  if (!plan.is_compact) return static_cast<int64_t>(source) * plan.rows_per_source;
  int64_t row = 0;
  for (size_t before = 0; before < source; ++before)
    row += static_cast<int64_t>(plan.ranks[before].kept_to[receiver].size());
  return row;
}

// The row of the receive tensors of `rank` that holds a token of `source`; -1 where it is not kept.
int64_t kept_row_of(const RankMajorPlan& plan, size_t source, int64_t token, int rank) {
  const std::vector<int32_t>& kept = plan.ranks[source].kept_to[rank];
  const auto found = std::ranges::find(kept, token);
  if (found == kept.end()) return -1;
  return first_row(plan, static_cast<size_t>(rank), source) + (found - kept.begin());
}

void copy_matrix_row(const Matrix& from, int64_t from_row, Matrix& to, int64_t to_row) {
  const int64_t bytes = epx::row_bytes(from.dtype, from.cols);
  std::copy_n(from.bytes.begin() + from_row * bytes, bytes, to.bytes.begin() + to_row * bytes);
}

// Calls take(receiver, source, token, row) for each kept row.
template <typename Take>
void for_each_row(const RankMajorPlan& plan, const Take& take) {
  for (size_t receiver = 0; receiver < plan.ranks.size(); ++receiver)
    for (size_t source = 0; source < plan.ranks.size(); ++source) {
      const std::vector<int32_t>& kept = plan.ranks[source].kept_to[receiver];
      for (size_t i = 0; i < kept.size(); ++i)
        take(receiver, source, int64_t{kept[i]}, first_row(plan, receiver, source) + static_cast<int64_t>(i));
    }
}

void require_shapes(const RankMajorPlan& plan, std::span<const Matrix> tokens, std::span<const Matrix> rows) {
  require_that(tokens.size() == plan.ranks.size() && rows.size() == plan.ranks.size(), "not one matrix per rank");
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    require_that(tokens[rank].rows == plan.ranks[rank].num_tokens, "a token matrix has other than T rows");
    require_that(rows[rank].rows == static_cast<int64_t>(plan.ranks.size()) * plan.rows_per_source,
                 "a receive matrix has other than P * M rows");
    for (const Matrix* matrix : {&tokens[rank], &rows[rank]})
      require_that(matrix->dtype == tokens[0].dtype && matrix->cols == tokens[0].cols, "matrices differ in dtype or H");
  }
}

// out[t] = the sum of its rows over the ranks in ascending order, as they arrive.
void sum_rows(const RankMajorPlan& plan, std::span<const Matrix> rows, std::span<Matrix> out, const Format* format) {
  require_shapes(plan, out, rows);
  std::vector<Matrix> arrived(rows.begin(), rows.end());
  for (Matrix& matrix : arrived)
    if (format != nullptr) matrix = dequantise(*format, quantise(*format, matrix), EPX_FLOAT32);
  std::vector<int64_t> row_of_rank(plan.ranks.size()); // of one token
  for (size_t home = 0; home < plan.ranks.size(); ++home)
    for (int64_t token = 0; token < plan.ranks[home].num_tokens; ++token) {
      for (size_t rank = 0; rank < plan.ranks.size(); ++rank)
        row_of_rank[rank] = kept_row_of(plan, home, token, static_cast<int>(rank));
      for (int64_t h = 0; h < out[home].cols; ++h) {
        float acc = 0.0F;
        for (size_t rank = 0; rank < plan.ranks.size(); ++rank)
          if (row_of_rank[rank] >= 0) acc += load(arrived[rank], row_of_rank[rank], h);
        store(out[home], token, h, acc);
      }
    }
}

} // namespace

RankMajorPlan plan_rank_major(const Problem& problem, std::span<const Routing> ranks, int64_t rows_per_source,
                              bool is_compact) {
  RankMajorPlan plan{problem, rows_per_source, std::vector<RankMajorRank>(ranks.size()), is_compact};
  const auto num_ranks = static_cast<int>(ranks.size());
  int next_expert = 0;
  for (int rank = 0; rank < num_ranks; ++rank) { // contiguous blocks; the first E mod P ranks own one more
    RankMajorRank& mine = plan.ranks[rank];
    mine.first_local_expert = next_expert;
    mine.num_local_experts = problem.num_experts / num_ranks + (rank < problem.num_experts % num_ranks ? 1 : 0);
    next_expert += mine.num_local_experts;
    mine.num_tokens = ranks[rank].num_tokens;
    mine.kept_to.resize(ranks.size());
    for (const int64_t expert : ranks[rank].topk_idx) {
      const bool is_expert = expert >= 0 && expert < problem.num_experts;
      mine.bad_indices += !is_expert && expert != -1;
      mine.topk_idx.push_back(is_expert ? expert : -1);
    }
  }
  for (size_t source = 0; source < ranks.size(); ++source)
    for (int64_t token = 0; token < ranks[source].num_tokens; ++token) {
      std::multiset<int> destinations;
      for (int k = 0; k < problem.top_k; ++k)
        destinations.insert(rank_of_route(plan, source, token, k));
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (!destinations.contains(rank)) continue;
        std::vector<int32_t>& kept = plan.ranks[source].kept_to[rank];
        if (static_cast<int64_t>(kept.size()) < rows_per_source)
          kept.push_back(static_cast<int32_t>(token));
        else
          plan.ranks[rank].dropped_here += static_cast<int64_t>(destinations.count(rank));
      }
    }
  return plan;
}

void dispatch_rank_major(const RankMajorPlan& plan, const RankMajorDispatchTensors& tensors) {
  const int top_k = plan.problem.top_k;
  const Arrivals arrivals(tensors.tokens, tensors.formats);
  require_shapes(plan, arrivals.rows(), tensors.recv_tokens);
  for (size_t receiver = 0; receiver < plan.ranks.size(); ++receiver)
    for (size_t source = 0; source < plan.ranks.size(); ++source)
      tensors.counts[receiver][source] = static_cast<int64_t>(plan.ranks[source].kept_to[receiver].size());
  for_each_row(plan, [&](size_t receiver, size_t source, int64_t token, int64_t row) {
    copy_matrix_row(arrivals.rows()[source], token, tensors.recv_tokens[receiver], row);
    arrivals.put_scales(source, token, receiver, row);
    if (!tensors.sidecars.empty()) {
      const Sidecar& from = tensors.sidecars[source];
      std::copy_n(from.bytes.begin() + token * from.row_bytes, from.row_bytes,
                  tensors.recv_sidecars[receiver].bytes.begin() + row * from.row_bytes);
    }
    for (int k = 0; k < top_k; ++k) {
      const bool goes_here = rank_of_route(plan, source, token, k) == static_cast<int>(receiver);
      const int64_t expert = plan.ranks[source].topk_idx[token * top_k + k];
      tensors.recv_topk_idx[receiver][row * top_k + k] =
          goes_here ? expert - plan.ranks[receiver].first_local_expert : int64_t{-1};
      if (!tensors.recv_weights.empty())
        tensors.recv_weights[receiver][row * top_k + k] =
            goes_here ? tensors.topk_weights[source][token * top_k + k] : 0.0F;
    }
  });
}

void combine_rank_major(const RankMajorPlan& plan, std::span<const Matrix> expert_out, std::span<Matrix> out,
                        const Format* format) {
  sum_rows(plan, expert_out, out, format);
}

void combine_rank_major_bwd(const RankMajorPlan& plan, std::span<const Matrix> grad_out, std::span<Matrix> grad_expert_out,
                            const FormatTensors* formats) {
  const Arrivals arrivals(grad_out, formats);
  require_shapes(plan, arrivals.rows(), grad_expert_out);
  for_each_row(plan, [&](size_t receiver, size_t source, int64_t token, int64_t row) {
    if (token >= 0) {
      copy_matrix_row(arrivals.rows()[source], token, grad_expert_out[receiver], row);
      arrivals.put_scales(source, token, receiver, row);
      return;
    }
    arrivals.zero_scales(receiver, row);
    const int64_t bytes = epx::row_bytes(grad_expert_out[receiver].dtype, grad_expert_out[receiver].cols);
    std::fill_n(grad_expert_out[receiver].bytes.begin() + row * bytes, bytes, std::byte{0});
  });
}

void dispatch_rank_major_bwd(const RankMajorPlan& plan, const RankMajorDispatchBwdTensors& tensors) {
  sum_rows(plan, tensors.grad_recv, tensors.grad_tokens, tensors.format);
  const int top_k = plan.problem.top_k;
  for (size_t home = 0; home < tensors.grad_topk_weights.size(); ++home)
    for (int64_t token = 0; token < plan.ranks[home].num_tokens; ++token)
      for (int k = 0; k < top_k; ++k) {
        const int rank = rank_of_route(plan, home, token, k);
        const int64_t row = rank < 0 ? -1 : kept_row_of(plan, home, token, rank);
        tensors.grad_topk_weights[home][token * top_k + k] =
            row < 0 ? 0.0F : tensors.grad_recv_weights[rank][row * top_k + k];
      }
}

} // namespace epx::reference
