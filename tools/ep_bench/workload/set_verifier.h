// SPDX-License-Identifier: Apache-2.0
// What the comparisons with the serial reference have in common (verify.cc, verify_rank_major.cc).
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/dtypes.h"
#include "runtime/reference/formats.h"
#include "runtime/reference/reference.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/row_format.h"
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

// ReceivedRows are what dispatch leaves in the receive tensors of all ranks: rows, and the scales of those that arrive quantised.
struct ReceivedRows {
  std::vector<Matrix> tokens;                    // [N, H]
  std::vector<reference::ReceivedScales> scales; // in the layout of scales
  std::vector<Floats> row_scales;                // [N]
};

// SetInputs are all ranks' inputs of one input set.
struct SetInputs {
  std::vector<reference::Routing> routing;
  std::vector<Matrix> tokens, grad_out;      // [T, H] of each rank
  std::vector<Matrix> expert_out, grad_recv; // [N, H]
  std::vector<Matrix> scales;                // [T, S], of rows that come quantised
  std::vector<Floats> row_scales;            // [T], of those that have them
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
      all_.tokens.push_back({.dtype = tokens_dtype(options),
                             .rows = options.tokens,
                             .cols = options.hidden,
                             .bytes = std::move(by_token.tokens)});
      if (options.has_quantised_input) add_scales(std::move(by_token.scales), std::move(by_token.row_scales));
      all_.grad_out.push_back(matrix(std::move(by_token.grad_out), options.tokens));
      all_.expert_out.push_back(matrix(std::move(by_row.expert_out), measured.rows()));
      all_.grad_recv.push_back(matrix(std::move(by_row.grad_recv), measured.rows()));
      all_.grad_recv_weights.push_back(std::move(by_row.grad_recv_weights));
    }
    inputs_ = measured.tensors_of(mine_.by_token);
    if (options.sum_format != NamedFormat::None) sum_format_ = reference_format(quantised_sum(options));
  }

protected:
  reference::Problem problem() const {
    return {.num_experts = options_.experts,
            .top_k = options_.top_k,
            .alignment = options_.alignment,
            .max_recv_tokens = measured_.info().max_recv_tokens_per_rank,
            .precision = options_.combine_precision,
            .ranks_per_node = measured_.info().ranks_per_node,
            .zone_stride = options_.zone_stride};
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

  // Returns receive tensors of all ranks that are scribbled as the library's are.
  ReceivedRows scribbled_rows() const {
    const int num_ranks = peers_.num_ranks();
    const int64_t rows = measured_.rows();
    ReceivedRows received{scribbled_matrices(num_ranks, recv_tokens_dtype(options_), rows, options_.hidden), {}, {}};
    if (options_.row_format == NamedFormat::None) return received;
    const QuantisedRow row = quantised_row(options_);
    reference::ReceivedScales scales{.layout = options_.scale_layout,
                                     .dtype = row.scales,
                                     .rows = rows,
                                     .num_scales = row_format(options_).num_scales(options_.hidden),
                                     .bytes = {}};
    scales.bytes.assign(static_cast<size_t>(reference::bytes_of(scales)), kScribble);
    received.scales.assign(num_ranks, scales);
    if (row.has_row_scale()) received.row_scales = scribbled_vectors<float>(num_ranks, rows);
    return received;
  }

  // Returns the format of dispatch as the reference takes it, which writes the scales to `received`; none where rows travel as
  // they are.
  std::optional<reference::FormatTensors> format_tensors(ReceivedRows& received) const {
    if (options_.format() == NamedFormat::None) return std::nullopt;
    return reference::FormatTensors{.format = reference_format(quantised_row(options_)),
                                    .scales = all_.scales,
                                    .row_scales = all_.row_scales,
                                    .encode_scales = {},
                                    .recv_scales = received.scales,
                                    .recv_row_scales = received.row_scales};
  }

  // Returns the format of partial sums as the reference takes it; NULL where they travel in the dtype.
  const reference::Format* sum_format() const { return sum_format_ ? &*sum_format_ : nullptr; }

  // Counts this rank's wrong elements and scales.
  int64_t wrong_rows(const ReceivedRows& expected) const {
    const int rank = peers_.rank();
    const RowOutputs& actual = measured_.by_row();
    int64_t wrong = count_different(expected.tokens[rank].bytes, actual.recv_tokens.read<std::byte>());
    if (!expected.scales.empty())
      wrong += count_different(expected.scales[rank].bytes, actual.recv_scales.read<std::byte>());
    if (!expected.row_scales.empty()) wrong += wrong_elements(expected.row_scales, actual.recv_row_scales);
    return wrong;
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
  // With the scaling's own floor, as the calls pass it.
  static reference::Format reference_format(const QuantisedRow& row) {
    return {row.scaling, row.elements, row.scales, RowFormat(row.scaling).amax_floor};
  }

  void add_scales(std::vector<std::byte> scales, Floats row_scales) {
    all_.scales.push_back({.dtype = quantised_row(options_).scales,
                           .rows = options_.tokens,
                           .cols = row_format(options_).num_scales(options_.hidden),
                           .bytes = std::move(scales)});
    if (!row_scales.empty()) all_.row_scales.push_back(std::move(row_scales));
  }

  Matrix matrix(std::vector<std::byte> bytes, int64_t rows) const {
    return {.dtype = options_.dtype, .rows = rows, .cols = options_.hidden, .bytes = std::move(bytes)};
  }

  std::optional<reference::Format> sum_format_;
};

// Returns this rank's wrong elements of one input set, in the order of operations_of(layout). Collective.
WrongCounts verify_set(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers,
                       int set);
WrongCounts verify_rank_major_set(MeasuredGroup& measured, const Workload& workload, const Options& options,
                                  const Peers& peers, int set);

} // namespace epx::bench
