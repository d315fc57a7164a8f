// SPDX-License-Identifier: Apache-2.0
#include "moe/block/block.h"

#include <optional>

#include "base/error.h"
#include "moe/block/agreement.h"
#include "moe/block/call.h"
#include "moe/ffn/calls.h"
#include "moe/router/calls.h"
#include "moe/tensors.h"

namespace epx::moe {
namespace {

template <typename Args>
Args make_args(const CallPlace& place) {
  Args args{};
  args.struct_size = sizeof(args);
  args.cuda = place.cuda();
  return args;
}

// Those of an operation of the group, on the handle memory of these tensors.
template <typename Args>
Args make_args(const BlockPlan& plan, const CallPlace& place, const CallTensors& tensors) {
  Args args{};
  args.struct_size = sizeof(args);
  args.layer = plan.layer;
  args.handle_mem = tensors.handle_mem.data();
  args.handle_mem_bytes = tensors.handle_mem.size();
  args.stream = place.stream();
  return args;
}

// Checks the tensors of a forward that no part of the block checks. Returns T.
int64_t require_forward(const BlockPlan& plan, const epx_moe_block_fwd_args& args) {
  const Dim hidden{"H", plan.ffn.hidden};
  require_tensor(args.tokens, "tokens", {plan.dtype}, {{"T", kAnySize}, hidden});
  const Dim tokens{"T", args.tokens->sizes[0]};
  const Dim experts{"E", plan.router.num_experts};
  const Dim top_k{"K", plan.router.top_k};
  if (tokens.size > plan.shape.max_tokens)
    fail(EPX_ERROR_INVALID_ARGUMENT, "tokens has {} rows; max_tokens_per_rank is {}", tokens.size, plan.shape.max_tokens);
  if (plan.is_on_gpu())
    require_tensor(args.logits, "logits", kCudaLogits, {tokens, experts});
  else
    require_tensor(args.logits, "logits", {plan.real}, {tokens, experts});
  require_tensor(args.out, "out", {plan.dtype}, {tokens, hidden});
  allow_tensor(args.topk_idx, "topk_idx", kInteger, {tokens, top_k});
  allow_tensor(args.topk_weights, "topk_weights", {plan.real}, {tokens, top_k});
  allow_tensor(args.global_counts, "global_counts", kInteger, {{"P", plan.shape.num_ranks}, experts});
  return tokens.size;
}

void require_backward(const BlockPlan& plan, int64_t num_tokens, const epx_moe_block_bwd_args& args) {
  const Dim tokens{"T", num_tokens};
  const Dim hidden{"H", plan.ffn.hidden};
  require_tensor(args.grad_out, "grad_out", {plan.dtype}, {tokens, hidden});
  require_tensor(args.grad_tokens, "grad_tokens", {plan.dtype}, {tokens, hidden});
}

} // namespace

void Block::FreeRecord::operator()(epx_moe_errors_s* errors) const noexcept {
  if constexpr (kWithCuda) free_error_record(errors->record);
  delete errors;
}

Block::Block(epx_group group, const epx_moe_block_config& config, Arena* shared) : arena_(shared) {
  agree_after(group, Options(config), [&] {
    if (shared == nullptr && config.max_in_flight < 1)
      fail(EPX_ERROR_INVALID_ARGUMENT, "max_in_flight is {}; it must be at least 1", config.max_in_flight);
    PlannedBlock planned = plan_block(group, config);
    plan_ = planned.plan;
    exchange_ = std::move(planned.exchange);
    if (shared != nullptr)
      plan_.num_rows = shared->require_fit(group, plan_);
    else
      arena_bytes(footprint_of(plan_), config.max_in_flight); // refuses what is too large for any arena
    if (plan_.is_on_gpu())
      enqueue_on_cuda([&](auto) {
        cuda::load_block_kernels(plan_.dtype);
        auto record = std::make_unique<epx_moe_errors_s>();
        record->record = make_error_record();
        errors_.reset(record.release());
      });
  });
  if (shared == nullptr) {
    own_arena_ = std::make_unique<Arena>(group, plan_, config.max_in_flight);
    arena_ = own_arena_.get();
  }
  number_ = arena_->add_block();
}

void Block::release() {
  if (own_arena_ != nullptr) own_arena_->release();
}

void Block::read_errors(epx_moe_errors_report* report) const {
  if (errors_ == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "the block computes on the host, and has no record of errors: its calls return them");
  epx::moe::read_errors(*errors_->record, report);
}

int32_t Block::require_flight(int32_t flight) const {
  if (flight < 0 || flight >= arena_->num_flights())
    fail(EPX_ERROR_INVALID_ARGUMENT, "flight is {}; {} is {}", flight,
         own_arena_ != nullptr ? "max_in_flight" : "num_flights of the arena", arena_->num_flights());
  return flight;
}

template <typename Run>
void Block::run_or_abort(const Run& run) {
  CallState state;
  const auto abort = [&] {
    if (!state.is_captured && arena_->group() != nullptr) epx_group_abort(arena_->group());
  };
  try {
    run(state);
  } catch (const StatusError& error) {
    const bool is_refused = error.status() == EPX_ERROR_INVALID_ARGUMENT || error.status() == EPX_ERROR_UNSUPPORTED;
    if (!is_refused || state.has_called_group) abort();
    throw;
  } catch (...) {
    abort();
    throw;
  }
}

void Block::forward(const epx_moe_block_fwd_args& args) {
  run_or_abort([&](CallState& state) { forward(args, state); });
}

void Block::backward(const epx_moe_block_bwd_args& args) {
  run_or_abort([&](CallState& state) { backward(args, state); });
}

void Block::forward(const epx_moe_block_fwd_args& args, CallState& state) {
  const int32_t flight = require_flight(args.flight);
  const SharedTensors shared = arena_->shared_tensors(plan_);
  CallPlace place(plan_, args.cuda, arena_->device(), shared, errors_.get());
  const int64_t num_tokens = require_forward(plan_, args);
  place.require_memory({{args.tokens, "tokens"},
                        {args.out, "out"},
                        {args.topk_idx, "topk_idx"},
                        {args.topk_weights, "topk_weights"},
                        {args.global_counts, "global_counts"}});
  const CallTensors mine(plan_, arena_->flight_tensors(plan_, flight), shared, num_tokens, args.logits->dtype);

  auto router_args = make_args<epx_moe_router_args>(place);
  router_args.logits = args.logits;
  router_args.selection_bias = args.selection_bias;
  router_args.token_mask = args.token_mask;
  router_args.topk_idx = mine.topk_idx.get();
  router_args.topk_weights = mine.topk_weights.get();
  router_args.info = args.info;
  const CheckedRouter router(plan_.router, &router_args);
  auto ffn_args = make_args<epx_moe_ffn_args>(place);
  ffn_args.params = args.params;
  ffn_args.recv_tokens = mine.recv_tokens.get();
  ffn_args.counts = mine.counts.get();
  ffn_args.offsets = mine.offsets.get();
  ffn_args.recv_weights = plan_.is_early ? mine.recv_weights.get() : nullptr;
  ffn_args.expert_out = mine.expert_out.get();
  ffn_args.pre_act = plan_.recomputes ? nullptr : mine.pre_act.get();
  const CheckedFfn ffn(plan_.ffn, &ffn_args);

  Arena::Filled& filled = arena_->filled(flight);
  const auto late = [&](const Tensor& tensor) { return plan_.is_early ? nullptr : tensor.get(); };
  auto prepare = make_args<epx_prepare_args>(plan_, place, mine);
  prepare.topk_idx = mine.topk_idx.get();
  prepare.counts = mine.counts.get();
  prepare.offsets = mine.offsets.get();
  prepare.global_counts = mine.global_counts.get();
  auto dispatch = make_args<epx_dispatch_args>(plan_, place, mine);
  dispatch.tokens = args.tokens;
  dispatch.topk_weights = mine.topk_weights.get();
  dispatch.recv_tokens = mine.recv_tokens.get();
  dispatch.recv_weights = mine.recv_weights.get();
  auto combine = make_args<epx_combine_args>(plan_, place, mine);
  combine.expert_out = mine.expert_out.get();
  combine.recv_weights = late(mine.recv_weights);
  combine.out = args.out;
  arena_->run_in_order("the forward", place.stream(), [&](bool is_captured) {
    state.is_captured = is_captured;
    filled.num_tokens = -1;
    place.copy(ConstTensor(*args.logits), *mine.logits.get());
    router.run();
    exchange_->prepare(prepare);
    state.has_called_group = true;
    if (plan_.num_rows < plan_.shape.row_capacity) place.clamp_zones(mine.counts, mine.offsets, plan_.num_rows);
    exchange_->dispatch(dispatch);
    ffn.run();
    exchange_->combine(combine);
    if (args.topk_idx != nullptr) place.copy_integers(mine.topk_idx, *args.topk_idx);
    if (args.topk_weights != nullptr) place.copy(mine.topk_weights, *args.topk_weights);
    if (args.global_counts != nullptr) place.copy_integers(mine.global_counts, *args.global_counts);
  });
  filled = {number_, num_tokens, args.logits->dtype};
}

void Block::backward(const epx_moe_block_bwd_args& args, CallState& state) {
  const int32_t flight = require_flight(args.flight);
  const Arena::Filled filled = arena_->filled(flight);
  const SharedTensors shared = arena_->shared_tensors(plan_);
  CallPlace place(plan_, args.cuda, arena_->device(), shared, errors_.get());
  if (filled.num_tokens < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "flight {} has no forward to go back from", flight);
  if (filled.block != number_)
    fail(EPX_ERROR_INVALID_ARGUMENT, "flight {} has the forward of block {} of the arena; this is block {}", flight,
         filled.block, number_);
  require_backward(plan_, filled.num_tokens, args);
  place.require_memory({{args.grad_out, "grad_out"}, {args.grad_tokens, "grad_tokens"}});
  const CallTensors mine(plan_, arena_->flight_tensors(plan_, flight), shared, filled.num_tokens, filled.logits_dtype);

  auto again_args = make_args<epx_moe_ffn_args>(place);
  again_args.params = args.params;
  again_args.recv_tokens = mine.recv_tokens.get();
  again_args.counts = mine.counts.get();
  again_args.offsets = mine.offsets.get();
  again_args.pre_act = mine.pre_act.get();
  std::optional<CheckedFfn> again;
  if (plan_.recomputes) again.emplace(plan_.ffn, &again_args, FfnOutputs::pre_act);
  auto ffn_args = make_args<epx_moe_ffn_bwd_args>(place);
  ffn_args.params = args.params;
  ffn_args.recv_tokens = mine.recv_tokens.get();
  ffn_args.counts = mine.counts.get();
  ffn_args.offsets = mine.offsets.get();
  ffn_args.recv_weights = plan_.is_early ? mine.recv_weights.get() : nullptr;
  ffn_args.pre_act = mine.pre_act.get();
  ffn_args.grad_expert_out = mine.grad_expert_out.get();
  ffn_args.grad_recv = mine.grad_recv.get();
  ffn_args.grad_recv_weights = plan_.is_early ? mine.grad_recv_weights.get() : nullptr; // late: combine_bwd writes them
  ffn_args.grads = args.grads;
  ffn_args.accumulate = args.accumulate;
  const CheckedFfnBwd ffn(plan_.ffn, &ffn_args);
  auto router_args = make_args<epx_moe_router_bwd_args>(place);
  router_args.logits = mine.logits.get();
  router_args.topk_idx = mine.topk_idx.get();
  router_args.grad_topk_weights = mine.grad_topk_weights.get();
  router_args.global_counts = plan_.router.aux_loss_coeff != 0 ? mine.global_counts.get() : nullptr;
  router_args.aux_loss_grad = args.aux_loss_grad;
  router_args.grad_logits = args.grad_logits;
  const CheckedRouterBwd router(plan_.router, &router_args);

  const auto late = [&](const Tensor& tensor) { return plan_.is_early ? nullptr : tensor.get(); };
  auto combine = make_args<epx_combine_bwd_args>(plan_, place, mine);
  combine.grad_out = args.grad_out;
  combine.expert_out = late(mine.expert_out);
  combine.recv_weights = late(mine.recv_weights);
  combine.grad_expert_out = mine.grad_expert_out.get();
  combine.grad_recv_weights = late(mine.grad_recv_weights);
  auto dispatch = make_args<epx_dispatch_bwd_args>(plan_, place, mine);
  dispatch.grad_recv = mine.grad_recv.get();
  dispatch.grad_recv_weights = mine.grad_recv_weights.get();
  dispatch.grad_tokens = args.grad_tokens;
  dispatch.grad_topk_weights = mine.grad_topk_weights.get();
  arena_->run_in_order("the backward", place.stream(), [&](bool is_captured) {
    state.is_captured = is_captured;
    exchange_->combine_bwd(combine);
    state.has_called_group = true;
    if (again) again->run();
    ffn.run();
    exchange_->dispatch_bwd(dispatch);
    router.run();
  });
}

} // namespace epx::moe
