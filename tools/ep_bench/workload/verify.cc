// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/workload/verify.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "runtime/reference/reference.h"
#include "tools/ep_bench/workload/set_verifier.h"

namespace epx::bench {
namespace {

class ExpertMajorVerifier : SetVerifier {
public:
  ExpertMajorVerifier(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers,
                      int set)
      : SetVerifier(measured, workload, options, peers, set), plan_(reference::prepare(problem(), all_.routing)),
        recv_weights_(scribbled_vectors<float>(peers.num_ranks(), measured.rows())) {}

  // Counts this rank's wrong elements. Collective.
  WrongCounts run() { return {prepare(), dispatch(), combine(), combine_bwd(), dispatch_bwd()}; }

private:
  int64_t prepare() {
    call([&] { measured_.prepare_fully(inputs_); });
    return count_wrong_plan();
  }

  int64_t count_wrong_plan() const {
    const reference::RankPlan& expected = plan_.ranks[peers_.rank()];
    const PrepareOutputs actual = measured_.prepared();
    return count_different(expected.counts, actual.counts) + count_different(expected.offsets, actual.offsets) +
           count_different(plan_.global_counts, actual.global_counts) + count_different(expected.info, actual.info) +
           count_different(expected.slot, actual.slot) + count_different(expected.slot_origin, actual.slot_origin);
  }

  // Counts what dispatch has got wrong, and prepare_dispatch.
  int64_t dispatch() {
    ReceivedRows received = scribbled_rows();
    const auto formats = format_tensors(received);
    reference::dispatch(plan_, {.tokens = all_.tokens,
                                .sidecars = {},
                                .topk_weights = all_.topk_weights,
                                .recv_tokens = received.tokens,
                                .recv_sidecars = {},
                                .recv_weights = recv_weights_,
                                .pads_untouched = options_.pads == EPX_PADS_UNTOUCHED,
                                .formats = formats ? &*formats : nullptr});
    call([&] { measured_.dispatch(inputs_); });
    const int64_t wrong = wrong_rows(received) + wrong_elements(recv_weights_, measured_.by_row().recv_weights);
    call([&] { measured_.prepare_dispatch_fully(inputs_); });
    return wrong + count_wrong_plan() + wrong_rows(received) +
           wrong_elements(recv_weights_, measured_.by_row().recv_weights);
  }

  // From here on the inputs are the reference's recv_weights, so that an error in dispatch counts in dispatch alone.

  int64_t combine() {
    auto out = scribbled_matrices(peers_.num_ranks(), options_.dtype, options_.tokens, options_.hidden);
    reference::combine(plan_,
                       {.expert_out = all_.expert_out, .recv_weights = recv_weights_, .out = out, .format = sum_format()});
    measured_.load(mine_.by_row);
    call([&] {
      measured_.load_recv_weights(recv_weights_[peers_.rank()]);
      measured_.combine();
    });
    return wrong_elements(out, measured_.by_token().out, true);
  }

  int64_t combine_bwd() {
    auto grad_expert_out = scribbled_matrices(peers_.num_ranks(), options_.dtype, measured_.rows(), options_.hidden);
    auto grad_recv_weights = scribbled_vectors<float>(peers_.num_ranks(), measured_.rows());
    reference::combine_bwd(plan_, {.grad_out = all_.grad_out,
                                   .expert_out = all_.expert_out,
                                   .recv_weights = recv_weights_,
                                   .grad_expert_out = grad_expert_out,
                                   .grad_recv_weights = grad_recv_weights});
    call([&] {
      measured_.load_recv_weights(recv_weights_[peers_.rank()]);
      measured_.combine_bwd(inputs_);
    });
    return wrong_elements(grad_expert_out, measured_.by_row().grad_expert_out, true) +
           wrong_elements(grad_recv_weights, measured_.by_row().grad_recv_weights);
  }

  int64_t dispatch_bwd() {
    auto grad_tokens = scribbled_matrices(peers_.num_ranks(), options_.dtype, options_.tokens, options_.hidden);
    auto grad_topk_weights = scribbled_vectors<float>(peers_.num_ranks(), int64_t{options_.tokens} * options_.top_k);
    reference::dispatch_bwd(plan_, {.grad_recv = all_.grad_recv,
                                    .grad_recv_weights = all_.grad_recv_weights,
                                    .grad_tokens = grad_tokens,
                                    .grad_topk_weights = grad_topk_weights,
                                    .format = sum_format()});
    call([&] { measured_.dispatch_bwd(); });
    return wrong_elements(grad_tokens, measured_.by_token().grad_tokens, true) +
           wrong_elements(grad_topk_weights, measured_.by_token().grad_topk_weights);
  }

  reference::Plan plan_;
  std::vector<Floats> recv_weights_; // [N], what the reference's dispatch delivers
};

} // namespace

WrongCounts verify_set(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers,
                       int set) {
  return ExpertMajorVerifier(measured, workload, options, peers, set).run();
}

WrongCounts verify(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers) {
  WrongCounts wrong(operations_of(options.layout).size());
  for (int set = 0; set < kVerifiedSets; ++set) {
    const WrongCounts mine = options.is_rank_major() ? verify_rank_major_set(measured, workload, options, peers, set)
                                                     : verify_set(measured, workload, options, peers, set);
    const WrongCounts all = peers.gather(std::span<const int64_t>(mine)); // [P, operations]
    for (size_t i = 0; i < all.size(); ++i)
      wrong[i % wrong.size()] += all[i];
  }
  return wrong;
}

} // namespace epx::bench
