// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/verify.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/dtypes.h"
#include "runtime/reference/reference.h"

namespace epx::bench {
namespace {

using reference::Matrix;
using Floats = std::vector<float>;

// Makes outputs of all ranks that are scribbled as the library's are.
std::vector<Matrix> scribbled_matrices(int num_ranks, epx_dtype dtype, int64_t rows, int64_t cols) {
  Matrix matrix{.dtype = dtype, .rows = rows, .cols = cols, .bytes = {}};
  matrix.bytes.assign(rows * epx::row_bytes(dtype, cols), kScribble);
  return std::vector<Matrix>(num_ranks, matrix);
}

std::vector<Floats> scribbled_floats(int num_ranks, int64_t count) {
  Floats floats(count);
  if (count > 0) std::memset(floats.data(), static_cast<int>(kScribble), count * sizeof(float));
  return std::vector<Floats>(num_ranks, floats);
}

template <typename Expected, typename Actual>
int64_t count_different(const Expected& expected, const Actual& actual) {
  if (std::size(expected) != std::size(actual)) return std::max<int64_t>(1, std::ssize(expected));
  int64_t wrong = 0;
  for (size_t i = 0; i < std::size(expected); ++i)
    wrong += expected[i] != actual[i];
  return wrong;
}

// Has all ranks' inputs of one input set, and the reference's results.
class SetVerifier {
public:
  SetVerifier(Exchange& exchange, const Workload& workload, const Options& options, const Peers& peers, int set)
      : exchange_(exchange), options_(options), peers_(peers) {
    const int num_ranks = peers.num_ranks();
    std::vector<reference::Routing> routing;
    for (int rank = 0; rank < num_ranks; ++rank) {
      TokenInputs by_token = workload.token_inputs(set, rank);
      RowInputs by_row = workload.row_inputs(set, rank, exchange.rows());
      if (rank == peers.rank()) mine_ = {by_token, by_row};
      routing.push_back({.num_tokens = options.tokens, .topk_idx = std::move(by_token.topk_idx)});
      topk_weights_.push_back(std::move(by_token.topk_weights));
      tokens_.push_back(matrix(std::move(by_token.tokens), options.tokens));
      grad_out_.push_back(matrix(std::move(by_token.grad_out), options.tokens));
      expert_out_.push_back(matrix(std::move(by_row.expert_out), exchange.rows()));
      grad_recv_.push_back(matrix(std::move(by_row.grad_recv), exchange.rows()));
      grad_recv_weights_.push_back(std::move(by_row.grad_recv_weights));
    }
    plan_ = reference::prepare({.num_experts = options.experts,
                                .top_k = options.top_k,
                                .alignment = options.alignment,
                                .max_recv_tokens = exchange.info().max_recv_tokens_per_rank,
                                .precision = options.combine_precision,
                                .ranks_per_node = exchange.info().ranks_per_node},
                               routing);
    recv_weights_ = scribbled_floats(num_ranks, exchange.rows());
    inputs_ = exchange.tensors_of(mine_.by_token);
  }

  // Counts this rank's wrong elements. Collective.
  WrongCounts run() { return {prepare(), dispatch(), combine(), combine_bwd(), dispatch_bwd()}; }

private:
  int64_t prepare() {
    call([&] { exchange_.prepare_fully(inputs_); });
    return count_wrong_plan();
  }

  int64_t count_wrong_plan() const {
    const reference::RankPlan& expected = plan_.ranks[peers_.rank()];
    const PrepareOutputs actual = exchange_.prepared();
    return count_different(expected.counts, actual.counts) + count_different(expected.offsets, actual.offsets) +
           count_different(plan_.global_counts, actual.global_counts) + count_different(expected.info, actual.info) +
           count_different(expected.slot, actual.slot) + count_different(expected.slot_origin, actual.slot_origin);
  }

  // Counts what dispatch has got wrong, and prepare_dispatch.
  int64_t dispatch() {
    auto recv_tokens = scribbled_matrices(peers_.num_ranks(), options_.dtype, exchange_.rows(), options_.hidden);
    reference::dispatch(plan_, {.tokens = tokens_,
                                .sidecars = {},
                                .topk_weights = topk_weights_,
                                .recv_tokens = recv_tokens,
                                .recv_sidecars = {},
                                .recv_weights = recv_weights_,
                                .pads_untouched = options_.pads == EPX_PADS_UNTOUCHED});
    call([&] { exchange_.dispatch(inputs_); });
    const int64_t wrong = wrong_elements(recv_tokens, exchange_.by_row().recv_tokens, false) +
                          wrong_elements(recv_weights_, exchange_.by_row().recv_weights);
    call([&] { exchange_.prepare_dispatch_fully(inputs_); });
    return wrong + count_wrong_plan() + wrong_elements(recv_tokens, exchange_.by_row().recv_tokens, false) +
           wrong_elements(recv_weights_, exchange_.by_row().recv_weights);
  }

  // From here on the inputs are the reference's recv_weights, so that an error in dispatch counts in dispatch alone.

  int64_t combine() {
    auto out = scribbled_matrices(peers_.num_ranks(), options_.dtype, options_.tokens, options_.hidden);
    reference::combine(plan_, {.expert_out = expert_out_, .recv_weights = recv_weights_, .out = out});
    exchange_.load(mine_.by_row);
    call([&] {
      exchange_.load_recv_weights(recv_weights_[peers_.rank()]);
      exchange_.combine();
    });
    return wrong_elements(out, exchange_.by_token().out, true);
  }

  int64_t combine_bwd() {
    auto grad_expert_out = scribbled_matrices(peers_.num_ranks(), options_.dtype, exchange_.rows(), options_.hidden);
    auto grad_recv_weights = scribbled_floats(peers_.num_ranks(), exchange_.rows());
    reference::combine_bwd(plan_, {.grad_out = grad_out_,
                                   .expert_out = expert_out_,
                                   .recv_weights = recv_weights_,
                                   .grad_expert_out = grad_expert_out,
                                   .grad_recv_weights = grad_recv_weights});
    call([&] {
      exchange_.load_recv_weights(recv_weights_[peers_.rank()]);
      exchange_.combine_bwd(inputs_);
    });
    return wrong_elements(grad_expert_out, exchange_.by_row().grad_expert_out, true) +
           wrong_elements(grad_recv_weights, exchange_.by_row().grad_recv_weights);
  }

  int64_t dispatch_bwd() {
    auto grad_tokens = scribbled_matrices(peers_.num_ranks(), options_.dtype, options_.tokens, options_.hidden);
    auto grad_topk_weights = scribbled_floats(peers_.num_ranks(), int64_t{options_.tokens} * options_.top_k);
    reference::dispatch_bwd(plan_, {.grad_recv = grad_recv_,
                                    .grad_recv_weights = grad_recv_weights_,
                                    .grad_tokens = grad_tokens,
                                    .grad_topk_weights = grad_topk_weights});
    call([&] { exchange_.dispatch_bwd(); });
    return wrong_elements(grad_tokens, exchange_.by_token().grad_tokens, true) +
           wrong_elements(grad_topk_weights, exchange_.by_token().grad_topk_weights);
  }

  // Scribbles over the outputs and runs one call of the library, which all ranks enter and leave together.
  template <typename Call>
  void call(Call&& library_call) {
    exchange_.scribble();
    peers_.together([&] {
      library_call();
      exchange_.finish();
    });
  }

  Matrix matrix(std::vector<std::byte> bytes, int64_t rows) const {
    return {.dtype = options_.dtype, .rows = rows, .cols = options_.hidden, .bytes = std::move(bytes)};
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

  Exchange& exchange_;
  const Options& options_;
  const Peers& peers_;
  InputSet mine_;
  TokenTensors inputs_; // of this rank
  reference::Plan plan_;
  std::vector<Matrix> tokens_, grad_out_;      // [T, H] of each rank
  std::vector<Matrix> expert_out_, grad_recv_; // [N, H]
  std::vector<Floats> topk_weights_;           // [T, K]
  std::vector<Floats> grad_recv_weights_;      // [N]
  std::vector<Floats> recv_weights_;           // [N], what the reference's dispatch delivers
};

} // namespace

WrongCounts verify(Exchange& exchange, const Workload& workload, const Options& options, const Peers& peers) {
  WrongCounts wrong{};
  for (int set = 0; set < kVerifiedSets; ++set) {
    const WrongCounts mine = SetVerifier(exchange, workload, options, peers, set).run();
    for (const WrongCounts& of_rank : peers.gather(mine))
      std::ranges::transform(wrong, of_rank, wrong.begin(), std::plus<>());
  }
  return wrong;
}

} // namespace epx::bench
