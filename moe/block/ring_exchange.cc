// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "moe/block/exchange.h"
#include "moe/block/slice_calls.h"
#include "moe/permute/cuda/kernels.h"

namespace epx::moe {
namespace {

// The tensors of a call. G = P * max_tokens: the places of the tokens of all ranks.
struct RingTensors {
  RingTensors(const BlockPlan& plan, CallMemory& memory)
      : row_map(memory.flight_local.take(EPX_INT32, {places(plan), plan.router.top_k})),
        to_all(plan.num_ranks, memory.flight_local), home(plan.num_ranks, memory.flight_local),
        route_slices(plan.num_ranks, memory.shared_local),
        told(memory.shared_local.take(EPX_INT32, {1 + plan.max_tokens, plan.router.top_k})),
        all_told(memory.shared_window.take(EPX_INT32, {plan.num_ranks * (1 + plan.max_tokens), plan.router.top_k})),
        local_idx(memory.shared_local.take(EPX_INT32, {places(plan), plan.router.top_k})),
        home_map(memory.shared_local.take(EPX_INT32, {plan.max_tokens, plan.num_ranks})),
        rows(memory.shared_window.take(plan.dtype, {places(plan), plan.ffn.hidden})),
        weights(memory.shared_window.take(plan.real, {places(plan), plan.router.top_k})),
        partials(memory.shared_local.take(plan.dtype, {places(plan), plan.ffn.hidden})),
        partial_weights(memory.shared_local.take(plan.real, {places(plan), plan.router.top_k})) {}

  static int64_t places(const BlockPlan& plan) { return plan.num_ranks * plan.max_tokens; }

  // Of the flight.
  Tensor row_map; // [G, K]: of the routes to this rank's experts
  SliceTensors to_all, home;
  // Shared.
  SliceTensors route_slices;
  Tensor told, all_told;  // RingRoutes of this rank, and of all
  Tensor local_idx;       // [G, K]
  Tensor home_map;        // [T, P]
  Tensor rows;            // [G, H]: all ranks' tokens, or the partial sums of this rank's tokens
  Tensor weights;         // [G, K], likewise
  Tensor partials;        // [G, H]: this rank's partial sums of all tokens
  Tensor partial_weights; // [G, K]
};

class RingExchange final : public Exchange {
public:
  RingExchange(epx_group group, const BlockPlan& plan) : group_(group), plan_(plan) {
    const epx_group_info info = query(group);
    rank_ = info.rank;
    first_expert_ = info.first_local_expert;
  }

  size_t handle_mem_bytes() const override { return 0; }
  Footprint footprint() const override {
    CallMemory memory;
    RingTensors(plan_, memory);
    return memory.footprint();
  }
  size_t workspace_bytes(int64_t num_rows) const override {
    const int64_t routes = RingTensors::places(plan_) * plan_.router.top_k;
    return std::max(cuda::row_map_bytes(routes, plan_.ffn.num_experts), cuda::owners_bytes(num_rows));
  }

  void prepare(const ExchangeCall& call, const epx_prepare_args& args) override {
    const RingTensors mine = tensors(call);
    const CallPlace& place = call.place;
    const int64_t tokens = args.topk_idx->sizes[0], top_k = plan_.router.top_k, experts = plan_.router.num_experts;
    const auto integers = [](const Tensor& tensor) { return static_cast<int32_t*>(tensor.data()); };
    auto* const global_counts = static_cast<int32_t*>(args.global_counts->data);
    place.for_each((1 + plan_.max_tokens) * top_k, RingRoutes{static_cast<const int32_t*>(args.topk_idx->data), tokens,
                                                              plan_.max_tokens, top_k, integers(mine.told)});
    place.for_each(plan_.num_ranks,
                   RingSlices{1 + plan_.max_tokens, rank_, mine.route_slices.arrays(), global_counts, experts});
    mine.route_slices.move(group_, args.stream, *mine.told.get(), *mine.all_told.get());
    place.for_each(RingTensors::places(plan_) * top_k,
                   GatheredRoutes{integers(mine.all_told), tokens, plan_.max_tokens, top_k, experts, first_expert_,
                                  plan_.ffn.num_experts, rank_, integers(mine.local_idx), global_counts,
                                  mine.to_all.arrays(), mine.home.arrays()});
    sort_routes(place, mine.local_idx, plan_.layer.alignment, args.counts, args.offsets, mine.row_map);
  }

  void dispatch(const ExchangeCall& call, const epx_dispatch_args& args) override {
    const RingTensors mine = tensors(call);
    mine.to_all.move(group_, args.stream, *args.tokens, *mine.rows.get());
    mine.to_all.move(group_, args.stream, *args.topk_weights, *mine.weights.get());
    Permutation(call.place, mine.row_map).permute(mine.rows.get(), mine.weights.get(), args.recv_tokens, args.recv_weights);
  }

  void combine(const ExchangeCall& call, const epx_combine_args& args) override {
    const RingTensors mine = tensors(call);
    Permutation(call.place, mine.row_map).sum(args.expert_out, nullptr, mine.partials.get(), nullptr);
    add_at_home(call, mine, args.stream, mine.partials, mine.rows, *args.out);
  }

  void combine_bwd(const ExchangeCall& call, const epx_combine_bwd_args& args) override {
    const RingTensors mine = tensors(call);
    mine.to_all.move(group_, args.stream, *args.grad_out, *mine.rows.get());
    Permutation(call.place, mine.row_map).permute(mine.rows.get(), nullptr, args.grad_expert_out, nullptr);
  }

  void dispatch_bwd(const ExchangeCall& call, const epx_dispatch_bwd_args& args) override {
    const RingTensors mine = tensors(call);
    Permutation(call.place, mine.row_map)
        .sum(args.grad_recv, args.grad_recv_weights, mine.partials.get(), mine.partial_weights.get());
    add_at_home(call, mine, args.stream, mine.partials, mine.rows, *args.grad_tokens);
    add_at_home(call, mine, args.stream, mine.partial_weights, mine.weights, *args.grad_topk_weights);
  }

private:
  RingTensors tensors(const ExchangeCall& call) const {
    CallMemory memory = call.memory;
    return {plan_, memory};
  }

  // Each rank's partial sums go home into `received`, and are added there in rank order.
  void add_at_home(const ExchangeCall& call, const RingTensors& mine, epx_stream stream, const Tensor& partials,
                   const Tensor& received, const epx_tensor& tokens) const {
    mine.home.move(group_, stream, *partials.get(), *received.get());
    const Tensor map = first_rows(mine.home_map, tokens.sizes[0]);
    call.place.for_each(tokens.sizes[0] * plan_.num_ranks,
                        HomeRows{plan_.num_ranks, plan_.max_tokens, static_cast<int32_t*>(map.data())});
    Permutation(call.place, map).sum(received.get(), nullptr, &tokens, nullptr);
  }

  epx_group group_;
  BlockPlan plan_;
  int rank_ = 0;
  int first_expert_ = 0;
};

} // namespace

std::unique_ptr<Exchange> make_ring_exchange(epx_group group, const BlockPlan& plan) {
  return std::make_unique<RingExchange>(group, plan);
}

} // namespace epx::moe
