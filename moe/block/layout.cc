// SPDX-License-Identifier: Apache-2.0
#include "moe/block/layout.h"

#include <optional>

#include "base/dtypes.h"
#include "base/error.h"

namespace epx::moe {
namespace {

constexpr int64_t kAlignment = 256; // bytes

[[noreturn]] void refuse_size() {
  fail(EPX_ERROR_INVALID_ARGUMENT, "the block's memory has more bytes than an int64 can count");
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

Tensor Carver::take(epx_dtype dtype, Shape shape) {
  const std::span<const int64_t> sizes = shape.sizes();
  const std::optional<int64_t> bytes = checked_bytes_of_rows(dtype, sizes[0], sizes.size() > 1 ? sizes[1] : 1);
  if (!bytes) refuse_size();
  return {take_bytes(*bytes), dtype, shape};
}

RoutingTensors::RoutingTensors(const BlockPlan& plan, int64_t num_tokens, epx_dtype logits_dtype, CallMemory& memory) {
  const auto take = [&](Carver& carver, epx_dtype dtype, int64_t columns) {
    return Tensor(carver.take(dtype, {plan.max_tokens, columns}).data(), dtype, {num_tokens, columns});
  };
  topk_idx = take(memory.flight_local, EPX_INT32, plan.router.top_k);
  topk_weights = take(memory.flight_local, plan.real, plan.router.top_k);
  logits = Tensor(take(memory.flight_local, plan.real, plan.router.num_experts).data(), logits_dtype,
                  {num_tokens, plan.router.num_experts});
  global_counts = memory.flight_local.take(EPX_INT32, {plan.num_ranks, plan.router.num_experts});
  grad_topk_weights = take(memory.shared_local, plan.real, plan.router.top_k);
}

} // namespace epx::moe
