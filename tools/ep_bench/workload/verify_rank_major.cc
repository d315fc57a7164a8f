// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "runtime/reference/rank_major.h"
#include "tools/ep_bench/workload/set_verifier.h"

namespace epx::bench {
namespace {

class RankMajorVerifier : SetVerifier {
public:
  RankMajorVerifier(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers, int set)
      : SetVerifier(measured, workload, options, peers, set),
        plan_(reference::plan_rank_major(problem(), all_.routing, options.rows_per_source(),
                                         options.layout == Layout::RankMajorCompact)) {}

  // Counts this rank's wrong elements. Collective.
  WrongCounts run() { return {dispatch(), combine(), combine_bwd(), dispatch_bwd()}; }

private:
  int64_t dispatch() {
    const int num_ranks = peers_.num_ranks();
    const int64_t rows = measured_.rows(), routes = rows * options_.top_k;
    ReceivedRows received = scribbled_rows();
    const auto formats = format_tensors(received);
    auto recv_topk_idx = scribbled_vectors<int64_t>(num_ranks, routes);
    auto recv_weights = scribbled_vectors<float>(num_ranks, routes);
    auto counts = scribbled_vectors<int64_t>(num_ranks, num_ranks);
    reference::dispatch_rank_major(plan_, {.tokens = all_.tokens,
                                           .sidecars = {},
                                           .topk_weights = all_.topk_weights,
                                           .recv_tokens = received.tokens,
                                           .recv_sidecars = {},
                                           .recv_topk_idx = recv_topk_idx,
                                           .recv_weights = recv_weights,
                                           .counts = counts,
                                           .formats = formats ? &*formats : nullptr});
    call([&] { measured_.dispatch(inputs_); });
    const RowOutputs& actual = measured_.by_row();
    return wrong_rows(received) + wrong_elements(recv_weights, actual.recv_weights) +
           count_different(recv_topk_idx[peers_.rank()], actual.recv_topk_idx.read<int64_t>()) +
           count_different(counts[peers_.rank()], actual.source_counts.read<int64_t>());
  }

  int64_t combine() {
    auto out = scribbled_matrices(peers_.num_ranks(), options_.dtype, options_.tokens, options_.hidden);
    reference::combine_rank_major(plan_, all_.expert_out, out, sum_format());
    measured_.load(mine_.by_row);
    call([&] { measured_.combine(); });
    return wrong_elements(out, measured_.by_token().out, true);
  }

  int64_t combine_bwd() {
    auto grad_expert_out = scribbled_matrices(peers_.num_ranks(), options_.dtype, measured_.rows(), options_.hidden);
    reference::combine_rank_major_bwd(plan_, all_.grad_out, grad_expert_out);
    call([&] { measured_.combine_bwd(inputs_); });
    return wrong_elements(grad_expert_out, measured_.by_row().grad_expert_out, false);
  }

  int64_t dispatch_bwd() {
    auto grad_tokens = scribbled_matrices(peers_.num_ranks(), options_.dtype, options_.tokens, options_.hidden);
    auto grad_topk_weights = scribbled_vectors<float>(peers_.num_ranks(), int64_t{options_.tokens} * options_.top_k);
    reference::dispatch_rank_major_bwd(plan_, {.grad_recv = all_.grad_recv,
                                               .grad_recv_weights = all_.grad_recv_weights,
                                               .grad_tokens = grad_tokens,
                                               .grad_topk_weights = grad_topk_weights,
                                               .format = sum_format()});
    call([&] { measured_.dispatch_bwd(); });
    return wrong_elements(grad_tokens, measured_.by_token().grad_tokens, true) +
           wrong_elements(grad_topk_weights, measured_.by_token().grad_topk_weights);
  }

  reference::RankMajorPlan plan_;
};

} // namespace

WrongCounts verify_rank_major_set(MeasuredGroup& measured, const Workload& workload, const Options& options,
                                  const Peers& peers, int set) {
  return RankMajorVerifier(measured, workload, options, peers, set).run();
}

} // namespace epx::bench
