// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "moe/block/exchange.h"
#include "moe/block/path.h"
#include "moe/ffn/calls.h"
#include "moe/ffn/workspace.h"

namespace epx::moe {
namespace {

// The tensors of a call. Peers reach the rows, their weights and the gradients of both.
struct DispatchTensors {
  DispatchTensors(const BlockPlan& plan, size_t handle_bytes, int64_t num_rows, CallMemory& memory);

  // Shared by all flights. With early weighting the backward does not read expert_out, which then is grad_expert_out.
  Tensor grad_expert_out, grad_recv; // [N, H] dtype
  Tensor grad_recv_weights;          // [N] real
  // Of the flight.
  Tensor recv_tokens, expert_out; // [N, H] dtype
  Tensor recv_weights;            // [N] real
  std::byte* handle_mem;
  size_t handle_mem_bytes;
  Tensor counts, offsets; // [E_l], [E_l + 1] INT32
  Tensor pre_act;         // [N, 2F or F] dtype; shared where the backward computes it again
};

DispatchTensors::DispatchTensors(const BlockPlan& plan, size_t handle_bytes, int64_t num_rows, CallMemory& memory)
    : handle_mem_bytes(handle_bytes) {
  const Shape rows = {num_rows, plan.ffn.hidden};
  recv_tokens = memory.flight_window.take(plan.dtype, rows);
  if (!plan.is_early) expert_out = memory.flight_window.take(plan.dtype, rows);
  recv_weights = memory.flight_window.take(plan.real, {num_rows});
  handle_mem = memory.flight_local.take_bytes(static_cast<int64_t>(handle_bytes));
  counts = memory.flight_local.take(EPX_INT32, {plan.ffn.num_experts});
  offsets = memory.flight_local.take(EPX_INT32, {plan.ffn.num_experts + 1});
  Carver& inner = plan.recomputes ? memory.shared_local : memory.flight_local;
  pre_act = inner.take(plan.dtype, {num_rows, plan.ffn.pre_act()});
  grad_expert_out = memory.shared_window.take(plan.dtype, rows);
  grad_recv = memory.shared_window.take(plan.dtype, rows);
  grad_recv_weights = memory.shared_window.take(plan.real, {num_rows});
  if (plan.is_early) expert_out = grad_expert_out;
}

class DispatchPath final : public BlockPath {
public:
  DispatchPath(const BlockPlan& plan, std::unique_ptr<Exchange> exchange)
      : BlockPath(plan), exchange_(std::move(exchange)) {}

  Footprint footprint(int64_t num_rows) const override {
    CallMemory memory;
    tensors(num_rows, memory);
    return memory.footprint();
  }

  int64_t workspace_bytes(int64_t num_rows) const override {
    if (!plan().is_on_gpu()) return 0; // the host's functions have their own
    return static_cast<int64_t>(std::max(ffn_fwd_bytes(plan().ffn, plan().dtype, num_rows, !plan().recomputes),
                                         ffn_bwd_bytes(plan().ffn, plan().dtype, num_rows)));
  }

  void forward(const PathCall& call, const epx_moe_block_fwd_args& args, const RunInOrder& run) override;
  void backward(const PathCall& call, const epx_moe_block_bwd_args& args, const RunInOrder& run) override;

private:
  DispatchTensors tensors(int64_t num_rows, CallMemory& memory) const {
    return {plan(), exchange_->handle_mem_bytes(), num_rows, memory};
  }

  // The tensor where weights are applied late, or early; else NULL.
  const epx_tensor* late(const Tensor& tensor) const { return plan().is_early ? nullptr : tensor.get(); }
  const epx_tensor* early(const Tensor& tensor) const { return plan().is_early ? tensor.get() : nullptr; }

  // Args with what those of all operations of a group begin with.
  template <typename Args>
  Args exchange_args(const PathCall& call, const DispatchTensors& mine) const {
    Args args{};
    args.struct_size = sizeof(args);
    args.layer = plan().layer;
    args.handle_mem = mine.handle_mem;
    args.handle_mem_bytes = mine.handle_mem_bytes;
    args.stream = call.place.stream();
    return args;
  }

  // Args with what those of all calls of the FFN have.
  template <typename Args>
  static Args ffn_args(const PathCall& call, const epx_moe_ffn_params* params, const DispatchTensors& mine) {
    auto args = call.place.make_args<Args>();
    args.params = params;
    args.recv_tokens = mine.recv_tokens.get();
    args.counts = mine.counts.get();
    args.offsets = mine.offsets.get();
    return args;
  }

  std::unique_ptr<Exchange> exchange_;
};

void DispatchPath::forward(const PathCall& call, const epx_moe_block_fwd_args& args, const RunInOrder& run) {
  CallMemory memory = call.memory;
  const DispatchTensors mine = tensors(call.num_rows, memory);
  auto ffn_args = DispatchPath::ffn_args<epx_moe_ffn_args>(call, args.params, mine);
  ffn_args.recv_weights = early(mine.recv_weights);
  ffn_args.expert_out = mine.expert_out.get();
  ffn_args.pre_act = plan().recomputes ? nullptr : mine.pre_act.get();
  const CheckedFfn ffn(plan().ffn, &ffn_args);

  auto prepare = exchange_args<epx_prepare_args>(call, mine);
  prepare.topk_idx = call.routing.topk_idx.get();
  prepare.counts = mine.counts.get();
  prepare.offsets = mine.offsets.get();
  prepare.global_counts = call.routing.global_counts.get();
  auto dispatch = exchange_args<epx_dispatch_args>(call, mine);
  dispatch.tokens = args.tokens;
  dispatch.topk_weights = call.routing.topk_weights.get();
  dispatch.recv_tokens = mine.recv_tokens.get();
  dispatch.recv_weights = mine.recv_weights.get();
  dispatch.format = plan().dispatch_format ? &*plan().dispatch_format : nullptr;
  auto combine = exchange_args<epx_combine_args>(call, mine);
  combine.expert_out = mine.expert_out.get();
  combine.recv_weights = late(mine.recv_weights);
  combine.out = args.out;
  run([&] {
    exchange_->prepare(prepare);
    call.has_called_group = true;
    if (call.num_rows < plan().row_capacity) call.place.clamp_zones(mine.counts, mine.offsets, call.num_rows);
    exchange_->dispatch(dispatch);
    ffn.run();
    exchange_->combine(combine);
  });
}

void DispatchPath::backward(const PathCall& call, const epx_moe_block_bwd_args& args, const RunInOrder& run) {
  CallMemory memory = call.memory;
  const DispatchTensors mine = tensors(call.num_rows, memory);
  auto again_args = ffn_args<epx_moe_ffn_args>(call, args.params, mine);
  again_args.pre_act = mine.pre_act.get();
  std::optional<CheckedFfn> again;
  if (plan().recomputes) again.emplace(plan().ffn, &again_args, FfnOutputs::pre_act);
  auto ffn_args = DispatchPath::ffn_args<epx_moe_ffn_bwd_args>(call, args.params, mine);
  ffn_args.recv_weights = early(mine.recv_weights);
  ffn_args.pre_act = mine.pre_act.get();
  ffn_args.grad_expert_out = mine.grad_expert_out.get();
  ffn_args.grad_recv = mine.grad_recv.get();
  ffn_args.grad_recv_weights = early(mine.grad_recv_weights); // late: combine_bwd writes them
  ffn_args.grads = args.grads;
  ffn_args.accumulate = args.accumulate;
  const CheckedFfnBwd ffn(plan().ffn, &ffn_args);

  auto combine = exchange_args<epx_combine_bwd_args>(call, mine);
  combine.grad_out = args.grad_out;
  combine.expert_out = late(mine.expert_out);
  combine.recv_weights = late(mine.recv_weights);
  combine.grad_expert_out = mine.grad_expert_out.get();
  combine.grad_recv_weights = late(mine.grad_recv_weights);
  auto dispatch = exchange_args<epx_dispatch_bwd_args>(call, mine);
  dispatch.grad_recv = mine.grad_recv.get();
  dispatch.grad_recv_weights = mine.grad_recv_weights.get();
  dispatch.grad_tokens = args.grad_tokens;
  dispatch.grad_topk_weights = call.routing.grad_topk_weights.get();
  run([&] {
    exchange_->combine_bwd(combine);
    call.has_called_group = true;
    if (again) again->run();
    ffn.run();
    exchange_->dispatch_bwd(dispatch);
  });
}

} // namespace

std::unique_ptr<BlockPath> make_dispatch_path(epx_group group, const epx_moe_block_config& config) {
  const BlockPlan plan = plan_block(group, config);
  return std::make_unique<DispatchPath>(plan,
                                        group != nullptr ? make_group_exchange(group, plan) : make_local_exchange(plan));
}

} // namespace epx::moe
