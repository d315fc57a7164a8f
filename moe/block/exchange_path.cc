// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "moe/block/exchange.h"
#include "moe/block/group.h"
#include "moe/block/path.h"
#include "moe/ffn/calls.h"
#include "moe/ffn/fp8/calls.h"
#include "moe/ffn/workspace.h"

namespace epx::moe {
namespace {

constexpr const char* kFp8ParamsName = "fp8_params"; // in messages

// Rows that travel to their experts, with their scales where they arrive in FP8.
struct TravelledRows {
  TravelledRows() = default;
  TravelledRows(const BlockPlan& plan, int64_t num_rows, Carver& memory)
      : rows(memory.take(plan.is_fp8() ? EPX_FLOAT8_E4M3 : plan.dtype, {num_rows, plan.ffn.hidden})),
        scales(plan.is_fp8() ? memory.take(EPX_FLOAT32, {num_rows, plan.ffn.hidden / kQuantiseBlock}) : Tensor()) {}

  Tensor rows;   // [N, H]
  Tensor scales; // [N, H / 128] or none
};

// The tensors of a call. Peers reach the rows, their weights and the gradients of both.
struct PathTensors {
  PathTensors(const BlockPlan& plan, const Exchange& exchange, int64_t num_rows, CallMemory& memory);

  // Shared by all flights.
  TravelledRows grad_expert_out; // [N, H]
  Tensor grad_recv;              // [N, H] dtype
  Tensor grad_recv_weights;      // [N] real
  // Of the flight. With early weighting the backward does not read expert_out, which then is grad_recv.
  TravelledRows recv_tokens; // [N, H]
  Tensor expert_out;         // [N, H] dtype
  Tensor recv_weights;       // [N] real
  std::byte* handle_mem;
  size_t handle_mem_bytes;
  Tensor counts, offsets; // [E_l], [E_l + 1] INT32
  Tensor pre_act;         // [N, 2F or F] dtype; shared where the backward computes it again
  CallMemory of_exchange;
};

// Takes the parts of a footprint out of the memory of a call.
CallMemory take(const Footprint& footprint, CallMemory& memory) {
  return {Carver(memory.flight_window.take_bytes(footprint.flight_window)),
          Carver(memory.flight_local.take_bytes(footprint.flight_local)),
          Carver(memory.shared_window.take_bytes(footprint.shared_window)),
          Carver(memory.shared_local.take_bytes(footprint.shared_local))};
}

PathTensors::PathTensors(const BlockPlan& plan, const Exchange& exchange, int64_t num_rows, CallMemory& memory)
    : handle_mem_bytes(exchange.handle_mem_bytes()) {
  const Shape rows = {num_rows, plan.ffn.hidden};
  recv_tokens = TravelledRows(plan, num_rows, memory.flight_window);
  if (!plan.is_early) expert_out = memory.flight_window.take(plan.dtype, rows);
  recv_weights = memory.flight_window.take(plan.real, {num_rows});
  handle_mem = memory.flight_local.take_bytes(static_cast<int64_t>(handle_mem_bytes));
  counts = memory.flight_local.take(EPX_INT32, {plan.ffn.num_experts});
  offsets = memory.flight_local.take(EPX_INT32, {plan.ffn.num_experts + 1});
  Carver& inner = plan.recomputes ? memory.shared_local : memory.flight_local;
  pre_act = inner.take(plan.dtype, {num_rows, plan.ffn.pre_act()});
  grad_expert_out = TravelledRows(plan, num_rows, memory.shared_window);
  grad_recv = memory.shared_window.take(plan.dtype, rows);
  grad_recv_weights = memory.shared_window.take(plan.real, {num_rows});
  if (plan.is_early) expert_out = grad_recv;
  of_exchange = take(exchange.footprint(), memory);
}

// The format in which rows travel, with the scales that arrive, if they do; NULL where rows travel as they are.
class Format {
public:
  // Of tokens.
  Format(const BlockPlan& plan, const TravelledRows& to) : format_(plan.dispatch_format) {
    if (plan.is_fp8()) set_fp8(to);
  }
  // Of gradients.
  static Format of_gradients(const BlockPlan& plan, const TravelledRows& to) {
    Format format;
    if (!plan.is_fp8()) return format;
    format.set_fp8(to);
    format.format_->amax_floor = 0;
    return format;
  }

  const epx_row_format* get() const { return format_ ? &*format_ : nullptr; }

private:
  Format() = default;
  void set_fp8(const TravelledRows& to) {
    throw_if_failed(epx_row_format_init(&format_.emplace(), EPX_SCALING_BLOCK128));
    format_->recv_scales = to.scales.get();
  }

  std::optional<epx_row_format> format_;
};

// prepare -> dispatch -> FFN -> combine, by an exchange.
class ExchangePath final : public BlockPath {
public:
  ExchangePath(const BlockPlan& plan, std::unique_ptr<Exchange> exchange)
      : BlockPath(plan), exchange_(std::move(exchange)) {}

  Footprint footprint(int64_t num_rows) const override {
    require_rows(plan(), num_rows);
    CallMemory memory;
    tensors(num_rows, memory);
    return memory.footprint();
  }

  int64_t workspace_bytes(int64_t num_rows) const override {
    if (!plan().is_on_gpu()) return 0; // the host's functions have their own
    const BlockPlan& p = plan();
    const bool has_pre_act = !p.recomputes;
    if (p.is_fp8())
      return static_cast<int64_t>(std::max(fp8_fwd_bytes(p.ffn, p.dtype, rows_of(num_rows), has_pre_act),
                                           fp8_bwd_bytes(p.ffn, p.dtype, rows_of(num_rows), p.recipe)));
    const auto of_exchange = static_cast<int64_t>(exchange_->workspace_bytes(rows_of(num_rows)));
    return std::max(of_exchange, static_cast<int64_t>(std::max(ffn_fwd_bytes(p.ffn, p.dtype, num_rows, has_pre_act),
                                                               ffn_bwd_bytes(p.ffn, p.dtype, num_rows))));
  }

  void forward(const PathCall& call, const epx_moe_block_fwd_args& args, const RunInOrder& run) override;
  void backward(const PathCall& call, const epx_moe_block_bwd_args& args, const RunInOrder& run) override;

private:
  // The rows that tensors have: products in FP8 take multiples of kFp8ZoneAlignment.
  int64_t rows_of(int64_t num_rows) const {
    if (!plan().is_fp8()) return num_rows;
    return (num_rows + kFp8ZoneAlignment - 1) / kFp8ZoneAlignment * kFp8ZoneAlignment;
  }
  PathTensors tensors(int64_t num_rows, CallMemory& memory) const {
    return {plan(), *exchange_, rows_of(num_rows), memory};
  }

  // The tensor where weights are applied late, or early; else NULL.
  const epx_tensor* late(const Tensor& tensor) const { return plan().is_early ? nullptr : tensor.get(); }
  const epx_tensor* early(const Tensor& tensor) const { return plan().is_early ? tensor.get() : nullptr; }

  // Args with what those of all operations of a group begin with.
  template <typename Args>
  Args exchange_args(const PathCall& call, const PathTensors& mine) const {
    Args args{};
    args.struct_size = sizeof(args);
    args.layer = plan().layer;
    args.handle_mem = mine.handle_mem;
    args.handle_mem_bytes = mine.handle_mem_bytes;
    args.stream = call.place.stream();
    return args;
  }

  // Args with what those of all calls of the FFN have.
  template <typename Args, typename Params>
  static Args ffn_args(const PathCall& call, const Params* params, const PathTensors& mine) {
    auto args = call.place.make_args<Args>();
    args.params = params;
    args.recv_tokens = mine.recv_tokens.rows.get();
    args.counts = mine.counts.get();
    args.offsets = mine.offsets.get();
    return args;
  }
  template <typename Args>
  static Args fp8_args(const PathCall& call, const epx_moe_fp8_params* params, const PathTensors& mine) {
    auto args = ffn_args<Args>(call, params, mine);
    args.recv_scales = mine.recv_tokens.scales.get();
    return args;
  }

  // Check what the experts are going to compute, and return what computes it while `mine` lives.
  using Compute = std::function<void()>;
  Compute experts_forward(const PathCall& call, const epx_moe_block_fwd_args& args, const PathTensors& mine) const;
  Compute experts_again(const PathCall& call, const epx_moe_block_bwd_args& args, const PathTensors& mine) const;
  Compute experts_backward(const PathCall& call, const epx_moe_block_bwd_args& args, const PathTensors& mine) const;

  template <typename Checked>
  static Compute computing(Checked&& checked) {
    return [checked = std::forward<Checked>(checked)] { checked.run(); };
  }

  // Throws unless a call has the parameters of the block's recipe.
  template <typename Args>
  void require_params(const Args& args) const {
    if (plan().is_fp8() && args.params != nullptr)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "params is given; the block's recipe is in FP8: pass fp8_params, and NULL for params");
    if (plan().is_fp8() && args.fp8_params == nullptr)
      fail(EPX_ERROR_INVALID_ARGUMENT, "fp8_params is NULL; the block's recipe is in FP8");
    if (!plan().is_fp8() && args.fp8_params != nullptr)
      fail(EPX_ERROR_INVALID_ARGUMENT, "fp8_params is given; the block's recipe is EPX_MOE_RECIPE_WIDE, pass NULL");
  }

  std::unique_ptr<Exchange> exchange_;
};

ExchangePath::Compute ExchangePath::experts_forward(const PathCall& call, const epx_moe_block_fwd_args& args,
                                                    const PathTensors& mine) const {
  const auto fill = [&](auto call_args) {
    call_args.recv_weights = early(mine.recv_weights);
    call_args.expert_out = mine.expert_out.get();
    call_args.pre_act = plan().recomputes ? nullptr : mine.pre_act.get();
    return call_args;
  };
  require_params(args);
  if (plan().is_fp8()) {
    const auto fp8 = fill(fp8_args<epx_moe_ffn_fp8_args>(call, args.fp8_params, mine));
    return computing(CheckedFp8Ffn(plan().ffn, &fp8, kFp8ParamsName));
  }
  const auto wide = fill(ffn_args<epx_moe_ffn_args>(call, args.params, mine));
  return computing(CheckedFfn(plan().ffn, &wide));
}

// Of pre_act, where the forward has not kept it.
ExchangePath::Compute ExchangePath::experts_again(const PathCall& call, const epx_moe_block_bwd_args& args,
                                                  const PathTensors& mine) const {
  if (!plan().recomputes) return [] {};
  if (plan().is_fp8()) {
    auto fp8 = fp8_args<epx_moe_ffn_fp8_args>(call, args.fp8_params, mine);
    fp8.pre_act = mine.pre_act.get();
    return computing(CheckedFp8Ffn(plan().ffn, &fp8, kFp8ParamsName, FfnOutputs::pre_act));
  }
  auto wide = ffn_args<epx_moe_ffn_args>(call, args.params, mine);
  wide.pre_act = mine.pre_act.get();
  return computing(CheckedFfn(plan().ffn, &wide, FfnOutputs::pre_act));
}

ExchangePath::Compute ExchangePath::experts_backward(const PathCall& call, const epx_moe_block_bwd_args& args,
                                                     const PathTensors& mine) const {
  const auto fill = [&](auto call_args) {
    call_args.recv_weights = early(mine.recv_weights);
    call_args.pre_act = mine.pre_act.get();
    call_args.grad_expert_out = mine.grad_expert_out.rows.get();
    call_args.grad_recv = mine.grad_recv.get();
    call_args.grad_recv_weights = early(mine.grad_recv_weights); // late: combine_bwd writes them
    call_args.grads = args.grads;
    call_args.accumulate = args.accumulate;
    return call_args;
  };
  if (plan().is_fp8()) {
    auto fp8 = fill(fp8_args<epx_moe_ffn_fp8_bwd_args>(call, args.fp8_params, mine));
    fp8.grad_scales = mine.grad_expert_out.scales.get();
    fp8.recipe = plan().recipe;
    return computing(CheckedFp8FfnBwd(plan().ffn, &fp8, kFp8ParamsName));
  }
  const auto wide = fill(ffn_args<epx_moe_ffn_bwd_args>(call, args.params, mine));
  return computing(CheckedFfnBwd(plan().ffn, &wide));
}

void ExchangePath::forward(const PathCall& call, const epx_moe_block_fwd_args& args, const RunInOrder& run) {
  CallMemory memory = call.memory;
  const PathTensors mine = tensors(call.num_rows, memory);
  const Compute experts = experts_forward(call, args, mine);

  auto prepare = exchange_args<epx_prepare_args>(call, mine);
  prepare.topk_idx = call.routing.topk_idx.get();
  prepare.counts = mine.counts.get();
  prepare.offsets = mine.offsets.get();
  prepare.global_counts = call.routing.global_counts.get();
  auto dispatch = exchange_args<epx_dispatch_args>(call, mine);
  dispatch.tokens = args.tokens;
  dispatch.topk_weights = call.routing.topk_weights.get();
  dispatch.recv_tokens = mine.recv_tokens.rows.get();
  dispatch.recv_weights = mine.recv_weights.get();
  const Format format(plan(), mine.recv_tokens);
  dispatch.format = format.get();
  auto combine = exchange_args<epx_combine_args>(call, mine);
  combine.expert_out = mine.expert_out.get();
  combine.recv_weights = late(mine.recv_weights);
  combine.out = args.out;
  const ExchangeCall exchange{call.place, mine.of_exchange};
  run([&] {
    exchange_->prepare(exchange, prepare);
    call.has_called_group = true;
    if (const int64_t rows = rows_of(call.num_rows); rows < plan().row_capacity)
      call.place.clamp_zones(mine.counts, mine.offsets, rows);
    exchange_->dispatch(exchange, dispatch);
    experts();
    exchange_->combine(exchange, combine);
  });
}

void ExchangePath::backward(const PathCall& call, const epx_moe_block_bwd_args& args, const RunInOrder& run) {
  CallMemory memory = call.memory;
  const PathTensors mine = tensors(call.num_rows, memory);
  require_params(args);
  const Compute again = experts_again(call, args, mine);
  const Compute experts = experts_backward(call, args, mine);

  auto combine = exchange_args<epx_combine_bwd_args>(call, mine);
  combine.grad_out = args.grad_out;
  combine.expert_out = late(mine.expert_out);
  combine.recv_weights = late(mine.recv_weights);
  combine.grad_expert_out = mine.grad_expert_out.rows.get();
  combine.grad_recv_weights = late(mine.grad_recv_weights);
  const Format format = Format::of_gradients(plan(), mine.grad_expert_out);
  combine.format = format.get();
  auto dispatch = exchange_args<epx_dispatch_bwd_args>(call, mine);
  dispatch.grad_recv = mine.grad_recv.get();
  dispatch.grad_recv_weights = mine.grad_recv_weights.get();
  dispatch.grad_tokens = args.grad_tokens;
  dispatch.grad_topk_weights = call.routing.grad_topk_weights.get();
  const ExchangeCall exchange{call.place, mine.of_exchange};
  run([&] {
    exchange_->combine_bwd(exchange, combine);
    call.has_called_group = true;
    again();
    experts();
    exchange_->dispatch_bwd(exchange, dispatch);
  });
}

} // namespace

std::unique_ptr<BlockPath> make_path(epx_group group, const epx_moe_block_config& config) {
  const BlockPlan plan = plan_block(group, config);
  const auto make_exchange = [&] {
    if (group == nullptr) return make_local_exchange(plan);
    if (plan.path == EPX_MOE_PATH_RING) return make_ring_exchange(group, plan);
    if (plan.path == EPX_MOE_PATH_RAGGED) return make_ragged_exchange(group, plan);
    return make_group_exchange(group, plan);
  };
  return std::make_unique<ExchangePath>(plan, make_exchange());
}

} // namespace epx::moe
