// SPDX-License-Identifier: Apache-2.0
#include "moe/block/block.h"

#include <functional>

#include "base/error.h"
#include "moe/block/agreement.h"
#include "moe/block/call.h"
#include "moe/router/calls.h"
#include "moe/tensors.h"

namespace epx::moe {
namespace {

// Checks the tensors of a forward that no part of the block checks. Returns T.
int64_t require_forward(const BlockPlan& plan, const epx_moe_block_fwd_args& args) {
  const Dim hidden{"H", plan.ffn.hidden};
  require_tensor(args.tokens, "tokens", {plan.dtype}, {{"T", kAnySize}, hidden});
  const Dim tokens{"T", args.tokens->sizes[0]};
  const Dim experts{"E", plan.router.num_experts};
  const Dim top_k{"K", plan.router.top_k};
  if (tokens.size > plan.max_tokens)
    fail(EPX_ERROR_INVALID_ARGUMENT, "tokens has {} rows; max_tokens_per_rank is {}", tokens.size, plan.max_tokens);
  if (plan.is_on_gpu())
    require_tensor(args.logits, "logits", kCudaLogits, {tokens, experts});
  else
    require_tensor(args.logits, "logits", {plan.real}, {tokens, experts});
  require_tensor(args.out, "out", {plan.dtype}, {tokens, hidden});
  allow_tensor(args.topk_idx, "topk_idx", kInteger, {tokens, top_k});
  allow_tensor(args.topk_weights, "topk_weights", {plan.real}, {tokens, top_k});
  allow_tensor(args.global_counts, "global_counts", kInteger, {{"P", plan.num_ranks}, experts});
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
    path_ = make_path(group, config);
    num_rows_ = shared != nullptr ? shared->require_fit(group, *path_) : path_->plan().row_capacity;
    workspace_bytes_ = workspace_of(*path_, num_rows_);
    if (shared == nullptr)
      arena_bytes(footprint_of(*path_, num_rows_), config.max_in_flight); // refuses what is too large for any arena
    if (path_->plan().is_on_gpu())
      enqueue_on_cuda([&](auto) {
        cuda::load_block_kernels(path_->plan().dtype, path_->plan().is_fp8());
        auto record = std::make_unique<epx_moe_errors_s>();
        record->record = make_error_record();
        errors_.reset(record.release());
      });
  });
  if (shared == nullptr) {
    own_arena_ = std::make_unique<Arena>(group, *path_, num_rows_, config.max_in_flight);
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

CallPlace Block::make_place(const epx_moe_cuda* cuda, CallMemory& memory) const {
  std::byte* const workspace = memory.shared_local.take_bytes(workspace_bytes_);
  return {path_->plan(), cuda, arena_->device(), workspace, workspace_bytes_, errors_.get()};
}

void Block::forward(const epx_moe_block_fwd_args& args, CallState& state) {
  const BlockPlan& plan = path_->plan();
  const int32_t flight = require_flight(args.flight);
  CallMemory memory = arena_->memory(flight);
  CallPlace place = make_place(args.cuda, memory);
  const int64_t num_tokens = require_forward(plan, args);
  place.require_memory({{args.tokens, "tokens"},
                        {args.out, "out"},
                        {args.topk_idx, "topk_idx"},
                        {args.topk_weights, "topk_weights"},
                        {args.global_counts, "global_counts"}});
  const RoutingTensors routing(plan, num_tokens, args.logits->dtype, memory);

  auto router_args = place.make_args<epx_moe_router_args>();
  router_args.logits = args.logits;
  router_args.selection_bias = args.selection_bias;
  router_args.token_mask = args.token_mask;
  router_args.topk_idx = routing.topk_idx.get();
  router_args.topk_weights = routing.topk_weights.get();
  router_args.info = args.info;
  const CheckedRouter router(plan.router, &router_args);

  Arena::Filled& filled = arena_->filled(flight);
  const PathCall call = {place, routing, memory, num_rows_, state.has_called_group};
  path_->forward(call, args, [&](const std::function<void()>& enqueue) {
    arena_->run_in_order("the forward", place.stream(), [&](bool is_captured) {
      state.is_captured = is_captured;
      filled.num_tokens = -1;
      place.copy(ConstTensor(*args.logits), *routing.logits.get());
      router.run();
      enqueue();
      if (args.topk_idx != nullptr) place.copy_integers(routing.topk_idx, *args.topk_idx);
      if (args.topk_weights != nullptr) place.copy(routing.topk_weights, *args.topk_weights);
      if (args.global_counts != nullptr) place.copy_integers(routing.global_counts, *args.global_counts);
    });
  });
  filled = {number_, num_tokens, args.logits->dtype};
}

void Block::backward(const epx_moe_block_bwd_args& args, CallState& state) {
  const BlockPlan& plan = path_->plan();
  const int32_t flight = require_flight(args.flight);
  const Arena::Filled filled = arena_->filled(flight);
  CallMemory memory = arena_->memory(flight);
  CallPlace place = make_place(args.cuda, memory);
  if (filled.num_tokens < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "flight {} has no forward to go back from", flight);
  if (filled.block != number_)
    fail(EPX_ERROR_INVALID_ARGUMENT, "flight {} has the forward of block {} of the arena; this is block {}", flight,
         filled.block, number_);
  require_backward(plan, filled.num_tokens, args);
  place.require_memory({{args.grad_out, "grad_out"}, {args.grad_tokens, "grad_tokens"}});
  const RoutingTensors routing(plan, filled.num_tokens, filled.logits_dtype, memory);

  const PathCall call = {place, routing, memory, num_rows_, state.has_called_group};
  path_->backward(call, args, [&](const std::function<void()>& enqueue) {
    auto router_args = place.make_args<epx_moe_router_bwd_args>();
    router_args.logits = routing.logits.get();
    router_args.topk_idx = routing.topk_idx.get();
    router_args.grad_topk_weights = routing.grad_topk_weights.get();
    router_args.global_counts = plan.router.aux_loss_coeff != 0 ? routing.global_counts.get() : nullptr;
    router_args.aux_loss_grad = args.aux_loss_grad;
    router_args.grad_logits = args.grad_logits;
    const CheckedRouterBwd router(plan.router, &router_args);
    arena_->run_in_order("the backward", place.stream(), [&](bool is_captured) {
      state.is_captured = is_captured;
      enqueue();
      router.run();
    });
  });
}

} // namespace epx::moe
