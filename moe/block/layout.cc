// SPDX-License-Identifier: Apache-2.0
#include "moe/block/layout.h"

#include <algorithm>
#include <optional>

#include "base/dtypes.h"
#include "base/error.h"
#include "moe/ffn/workspace.h"
#include "moe/router/cuda/kernels.h"

namespace epx::moe {
namespace {

constexpr int64_t kAlignment = 256; // bytes

[[noreturn]] void refuse_size() {
  fail(EPX_ERROR_INVALID_ARGUMENT, "the block's memory has more bytes than an int64 can count");
}

int64_t workspace_bytes(const BlockPlan& plan) {
  if (!plan.is_on_gpu()) return 0; // the host's functions have their own
  return static_cast<int64_t>(
      std::max({ffn_fwd_bytes(plan.ffn, plan.dtype, plan.num_rows, !plan.recomputes),
                ffn_bwd_bytes(plan.ffn, plan.dtype, plan.num_rows), cuda::route_bwd_bytes(plan.router)}));
}

} // namespace

std::byte* Carver::take_bytes(int64_t bytes) {
  std::byte* const part = memory_ != nullptr ? memory_ + bytes_ : nullptr;
  int64_t rounded = 0;
  if (__builtin_add_overflow(bytes, kAlignment - 1, &rounded) ||
      __builtin_add_overflow(bytes_, rounded / kAlignment * kAlignment, &bytes_))
    refuse_size();
  return part;
}

void* Carver::take(int64_t rows, int64_t columns, epx_dtype dtype) {
  const std::optional<int64_t> bytes = checked_bytes_of_rows(dtype, rows, columns);
  if (!bytes) refuse_size();
  return take_bytes(*bytes);
}

FlightTensors::FlightTensors(const BlockPlan& plan, Carver& window, Carver& local)
    : recv_tokens(window.take(plan.num_rows, plan.ffn.hidden, plan.dtype)),
      expert_out(plan.is_early ? nullptr : window.take(plan.num_rows, plan.ffn.hidden, plan.dtype)),
      recv_weights(window.take(plan.num_rows, 1, plan.real)),
      handle_mem(local.take_bytes(static_cast<int64_t>(plan.shape.handle_mem_bytes))),
      topk_idx(local.take(plan.shape.max_tokens, plan.router.top_k, EPX_INT32)),
      topk_weights(local.take(plan.shape.max_tokens, plan.router.top_k, plan.real)),
      logits(local.take(plan.shape.max_tokens, plan.router.num_experts, plan.real)),
      counts(local.take(plan.ffn.num_experts, 1, EPX_INT32)), offsets(local.take(plan.ffn.num_experts + 1, 1, EPX_INT32)),
      global_counts(local.take(plan.shape.num_ranks, plan.router.num_experts, EPX_INT32)),
      pre_act(plan.recomputes ? nullptr : local.take(plan.num_rows, plan.ffn.pre_act(), plan.dtype)) {}

SharedTensors::SharedTensors(const BlockPlan& plan, Carver& window, Carver& local)
    : grad_expert_out(window.take(plan.num_rows, plan.ffn.hidden, plan.dtype)),
      grad_recv(window.take(plan.num_rows, plan.ffn.hidden, plan.dtype)),
      grad_recv_weights(window.take(plan.num_rows, 1, plan.real)),
      grad_topk_weights(local.take(plan.shape.max_tokens, plan.router.top_k, plan.real)),
      pre_act(plan.recomputes ? local.take(plan.num_rows, plan.ffn.pre_act(), plan.dtype) : nullptr), workspace(nullptr),
      workspace_bytes(epx::moe::workspace_bytes(plan)) {
  workspace = local.take_bytes(workspace_bytes);
}

Footprint footprint_of(const BlockPlan& plan) {
  Carver flight_window, flight_local, shared_window, shared_local;
  const FlightTensors flight(plan, flight_window, flight_local);
  const SharedTensors shared(plan, shared_window, shared_local);
  return {flight_window.bytes(), flight_local.bytes(), shared_window.bytes(), shared_local.bytes()};
}

} // namespace epx::moe
