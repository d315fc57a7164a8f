// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "moe/block/exchange.h"
#include "moe/block/slice_calls.h"
#include "moe/permute/cuda/kernels.h"

namespace epx::moe {
namespace {

// The tensors of a call. A rank's routes are T * K.
struct RaggedTensors {
  RaggedTensors(const BlockPlan& plan, CallMemory& memory)
      : row_map(memory.flight_local.take(EPX_INT32, {plan.max_tokens, plan.router.top_k})),
        slices(num_slices(plan), memory.flight_local), count_slices(plan.num_ranks, memory.shared_local),
        own_counts(memory.shared_local.take(EPX_INT32, {plan.router.num_experts})),
        own_offsets(memory.shared_local.take(EPX_INT32, {plan.router.num_experts + 1})),
        sorted(memory.shared_local.take(plan.dtype, {routes(plan), plan.ffn.hidden})),
        sorted_weights(memory.shared_local.take(plan.real, {routes(plan), 1})),
        home(memory.shared_window.take(plan.dtype, {routes(plan), plan.ffn.hidden})),
        home_weights(memory.shared_window.take(plan.real, {routes(plan), 1})) {}

  static ExpertBlocks experts(const BlockPlan& plan) { return {plan.router.num_experts, plan.num_ranks}; }
  static int64_t num_slices(const BlockPlan& plan) {
    return int64_t{plan.num_ranks} * ExpertSlices::slices_per_rank(experts(plan));
  }
  static int64_t routes(const BlockPlan& plan) { return plan.max_tokens * plan.router.top_k; }

  // Of the flight.
  Tensor row_map;      // [max_tokens, K]: where each route's row is among this rank's sorted rows
  SliceTensors slices; // by expert
  // Shared.
  SliceTensors count_slices;
  Tensor own_counts, own_offsets; // [E], [E + 1]: of this rank's routes
  Tensor sorted, sorted_weights;  // [max_tokens * K, H], [max_tokens * K, 1]: rows that go to their experts
  Tensor home, home_weights;      // likewise: rows that have come back
};

class RaggedExchange final : public Exchange {
public:
  RaggedExchange(epx_group group, const BlockPlan& plan) : group_(group), plan_(plan), rank_(query(group).rank) {}

  size_t handle_mem_bytes() const override { return 0; }
  Footprint footprint() const override {
    CallMemory memory;
    RaggedTensors(plan_, memory);
    return memory.footprint();
  }
  size_t workspace_bytes(int64_t /*num_rows*/) const override {
    const int64_t routes = RaggedTensors::routes(plan_);
    return std::max(cuda::row_map_bytes(routes, plan_.router.num_experts), cuda::owners_bytes(routes));
  }

  void prepare(const ExchangeCall& call, const epx_prepare_args& args) override {
    const RaggedTensors mine = tensors(call);
    const Tensor topk_idx(args.topk_idx->data, args.topk_idx->dtype, {args.topk_idx->sizes[0], args.topk_idx->sizes[1]});
    const auto integers = [](const void* data) { return static_cast<const int32_t*>(data); };
    sort_routes(call.place, topk_idx, 1, mine.own_counts.get(), mine.own_offsets.get(),
                first_rows(mine.row_map, topk_idx.size(0)));
    call.place.for_each(plan_.num_ranks, CountSlices{rank_, mine.count_slices.arrays()});
    const epx_tensor counts = epx_tensor_2d(mine.own_counts.data(), EPX_INT32, 1, plan_.router.num_experts);
    mine.count_slices.move(group_, args.stream, counts, *args.global_counts);
    call.place.for_each(RaggedTensors::num_slices(plan_),
                        ExpertSlices{integers(args.global_counts->data), integers(mine.own_offsets.data()),
                                     RaggedTensors::experts(plan_), std::max(plan_.layer.alignment, 1), rank_,
                                     mine.slices.arrays(), static_cast<int32_t*>(args.counts->data),
                                     static_cast<int32_t*>(args.offsets->data)});
  }

  void dispatch(const ExchangeCall& call, const epx_dispatch_args& args) override {
    const RaggedTensors mine = tensors(call);
    sort_rows(call, mine, *args.tokens, args.topk_weights);
    mine.slices.move(group_, args.stream, *mine.sorted.get(), *args.recv_tokens);
    mine.slices.move(group_, args.stream, *mine.sorted_weights.get(), column(*args.recv_weights));
  }

  void combine(const ExchangeCall& call, const epx_combine_args& args) override {
    const RaggedTensors mine = tensors(call);
    mine.slices.move(group_, args.stream, *args.expert_out, *mine.home.get(), EPX_SLICES_TRANSPOSED);
    add_rows(call, mine, nullptr, *args.out, nullptr);
  }

  void combine_bwd(const ExchangeCall& call, const epx_combine_bwd_args& args) override {
    const RaggedTensors mine = tensors(call);
    sort_rows(call, mine, *args.grad_out, nullptr);
    mine.slices.move(group_, args.stream, *mine.sorted.get(), *args.grad_expert_out);
  }

  void dispatch_bwd(const ExchangeCall& call, const epx_dispatch_bwd_args& args) override {
    const RaggedTensors mine = tensors(call);
    mine.slices.move(group_, args.stream, *args.grad_recv, *mine.home.get(), EPX_SLICES_TRANSPOSED);
    mine.slices.move(group_, args.stream, column(*args.grad_recv_weights), *mine.home_weights.get(), EPX_SLICES_TRANSPOSED);
    const epx_tensor weights = epx_tensor_1d(mine.home_weights.data(), plan_.real, RaggedTensors::routes(plan_));
    add_rows(call, mine, &weights, *args.grad_tokens, args.grad_topk_weights);
  }

private:
  RaggedTensors tensors(const ExchangeCall& call) const {
    CallMemory memory = call.memory;
    return {plan_, memory};
  }
  static epx_tensor column(const epx_tensor& values) {
    return epx_tensor_2d(values.data, values.dtype, values.sizes[0], 1);
  }

  void sort_rows(const ExchangeCall& call, const RaggedTensors& mine, const epx_tensor& tokens,
                 const epx_tensor* topk_weights) const {
    const Tensor map = first_rows(mine.row_map, tokens.sizes[0]);
    const epx_tensor weights = epx_tensor_1d(mine.sorted_weights.data(), plan_.real, RaggedTensors::routes(plan_));
    Permutation(call.place, map)
        .permute(&tokens, topk_weights, mine.sorted.get(), topk_weights != nullptr ? &weights : nullptr);
  }
  void add_rows(const ExchangeCall& call, const RaggedTensors& mine, const epx_tensor* weights, const epx_tensor& tokens,
                const epx_tensor* topk_weights) const {
    const Tensor map = first_rows(mine.row_map, tokens.sizes[0]);
    Permutation(call.place, map).sum(mine.home.get(), weights, &tokens, topk_weights);
  }

  epx_group group_;
  BlockPlan plan_;
  int rank_;
};

} // namespace

std::unique_ptr<Exchange> make_ragged_exchange(epx_group group, const BlockPlan& plan) {
  return std::make_unique<RaggedExchange>(group, plan);
}

} // namespace epx::moe
