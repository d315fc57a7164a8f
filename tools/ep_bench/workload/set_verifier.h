// SPDX-License-Identifier: Apache-2.0
// What the comparisons with the serial reference have in common (verify.cc, verify_rank_major.cc).
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/dtypes.h"
#include "runtime/reference/reference.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/workload/verify.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {

using reference::Matrix;
using Floats = std::vector<float>;

// Make outputs of all ranks that are scribbled as the library's are.
inline std::vector<Matrix> scribbled_matrices(int num_ranks, epx_dtype dtype, int64_t rows, int64_t cols) {
  Matrix matrix{.dtype = dtype, .rows = rows, .cols = cols, .bytes = {}};
  matrix.bytes.assign(rows * epx::row_bytes(dtype, cols), kScribble);
  return std::vector<Matrix>(num_ranks, matrix);
}
template <typename T>
std::vector<std::vector<T>> scribbled_vectors(int num_ranks, int64_t count) {
  std::vector<T> values(count);
  if (count > 0) std::memset(values.data(), static_cast<int>(kScribble), count * sizeof(T));
  return std::vector<std::vector<T>>(num_ranks, values);
}

template <typename Expected, typename Actual>
int64_t count_different(const Expected& expected, const Actual& actual) {
  if (std::size(expected) != std::size(actual)) return std::max<int64_t>(1, std::ssize(expected));
  int64_t wrong = 0;
  for (size_t i = 0; i < std::size(expected); ++i)
    wrong += expected[i] != actual[i];
  return wrong;
}

// SetInputs are all ranks' inputs of one input set.
struct SetInputs {
  std::vector<reference::Routing> routing;
  std::vector<Matrix> tokens, grad_out;      // [T, H] of each rank
  std::vector<Matrix> expert_out, grad_recv; // [N, H]
  std::vector<Floats> topk_weights;          // [T, K]
  std::vector<Floats> grad_recv_weights;     // [N]; rank-major: [N, K]
};

// SetVerifier has the inputs of one input set, and compares the outputs of calls on them.
class SetVerifier {
public:
  SetVerifier(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers, int set)
      : measured_(measured), options_(options), peers_(peers) {
    for (int rank = 0; rank < peers.num_ranks(); ++rank) {
      TokenInputs by_token = workload.token_inputs(set, rank);
      RowInputs by_row = workload.row_inputs(set, rank, measured.rows());
      if (rank == peers.rank()) mine_ = {by_token, by_row};
      all_.routing.push_back({.num_tokens = options.tokens, .topk_idx = std::move(by_token.topk_idx)});
      all_.topk_weights.push_back(std::move(by_token.topk_weights));
      all_.tokens.push_back(matrix(std::move(by_token.tokens), options.tokens));
      all_.grad_out.push_back(matrix(std::move(by_token.grad_out), options.tokens));
      all_.expert_out.push_back(matrix(std::move(by_row.expert_out), measured.rows()));
      all_.grad_recv.push_back(matrix(std::move(by_row.grad_recv), measured.rows()));
      all_.grad_recv_weights.push_back(std::move(by_row.grad_recv_weights));
    }
    inputs_ = measured.tensors_of(mine_.by_token);
  }

protected:
  reference::Problem problem() const {
    return {.num_experts = options_.experts,
            .top_k = options_.top_k,
            .alignment = options_.alignment,
            .max_recv_tokens = measured_.info().max_recv_tokens_per_rank,
            .precision = options_.combine_precision,
            .ranks_per_node = measured_.info().ranks_per_node};
  }

  // Scribbles over the outputs and runs one call of the library, which all ranks enter and leave together.
  template <typename Call>
  void call(Call&& library_call) {
    measured_.scribble();
    peers_.together([&] {
      library_call();
      measured_.finish();
    });
  }

  int64_t wrong_elements(const std::vector<Matrix>& expected, const Buffer& actual, bool nan_equals_nan) const {
    const Matrix& mine = expected[peers_.rank()];
    const Matrix copy{.dtype = mine.dtype, .rows = mine.rows, .cols = mine.cols, .bytes = actual.read<std::byte>()};
    return reference::count_wrong(mine, copy, nan_equals_nan);
  }

  // Weights are only copied, except those that combine_bwd computes from finite numbers.
  int64_t wrong_elements(const std::vector<Floats>& expected, const Buffer& actual) const {
    return reference::count_wrong(expected[peers_.rank()], actual.read<float>(), false);
  }

  MeasuredGroup& measured_;
  const Options& options_;
  const Peers& peers_;
  InputSet mine_;
  TokenTensors inputs_; // of this rank
  SetInputs all_;

private:
  Matrix matrix(std::vector<std::byte> bytes, int64_t rows) const {
    return {.dtype = options_.dtype, .rows = rows, .cols = options_.hidden, .bytes = std::move(bytes)};
  }
};

// Returns this rank's wrong elements of one input set, in the order of operations_of(layout). Collective.
WrongCounts verify_set(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers,
                       int set);
WrongCounts verify_rank_major_set(MeasuredGroup& measured, const Workload& workload, const Options& options,
                                  const Peers& peers, int set);

} // namespace epx::bench
