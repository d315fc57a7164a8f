// SPDX-License-Identifier: Apache-2.0
#include "tests/support/layer_memory.h"

#include "base/operations.h"
#include "tests/support/check.h"

namespace epx::test {

Tensor LayerMemory::tensor(std::byte* data, epx_dtype dtype, Shape shape) {
  return data != nullptr ? Tensor(data, dtype, shape) : Tensor();
}

template <typename Args>
void LayerMemory::pass_plan(Args& args) const {
  args.topk_idx = tensor(topk_idx, index_dtype, {num_tokens, layer.top_k});
  args.counts = tensor(counts, EPX_INT32, num_local_experts);
  args.offsets = tensor(offsets, EPX_INT32, num_local_experts + 1);
  args.zone_stride = zone_stride;
}

template <typename Args>
void LayerMemory::pass_rows(Args& args) const {
  args.tokens = token_rows(tokens);
  args.topk_weights = token_floats(topk_weights);
  args.recv_tokens = slot_rows(recv_tokens, dtype_of_recv());
  args.recv_weights = slot_floats(recv_weights);
  args.format = format_of(format);
  if (sidecar_bytes == 0) return;
  args.tokens = args.tokens.with_sidecar(sidecar, sidecar_bytes);
  args.recv_tokens = args.recv_tokens.with_sidecar(recv_sidecar, sidecar_bytes);
}

PrepareArgs LayerMemory::prepare() const {
  auto args = begin<PrepareArgs>();
  pass_plan(args);
  return args;
}

DispatchArgs LayerMemory::dispatch() const {
  auto args = begin<DispatchArgs>();
  pass_rows(args);
  return args;
}

PrepareDispatchArgs LayerMemory::prepare_dispatch() const {
  auto args = begin<PrepareDispatchArgs>();
  pass_plan(args);
  pass_rows(args);
  return args;
}

CombineArgs LayerMemory::combine() const {
  auto args = begin<CombineArgs>();
  args.expert_out = slot_rows(expert_out);
  args.recv_weights = slot_floats(expert_weights);
  args.out = token_rows(out);
  args.format = format_of(sum_format);
  return args;
}

CombineBwdArgs LayerMemory::combine_bwd() const {
  auto args = begin<CombineBwdArgs>();
  args.grad_out = token_rows(grad_out);
  args.expert_out = slot_rows(bwd_expert_out);
  args.recv_weights = slot_floats(bwd_weights);
  args.grad_expert_out = slot_rows(grad_expert_out, dtype_of_recv());
  args.format = format_of(format);
  args.grad_recv_weights = slot_floats(grad_recv_weights);
  return args;
}

DispatchBwdArgs LayerMemory::dispatch_bwd() const {
  auto args = begin<DispatchBwdArgs>();
  args.grad_recv = slot_rows(grad_recv);
  args.grad_recv_weights = slot_floats(grad_weights);
  args.grad_tokens = token_rows(grad_tokens);
  args.format = format_of(sum_format);
  args.grad_topk_weights = token_floats(grad_topk_weights);
  return args;
}

DispatchRankMajorArgs LayerMemory::dispatch_rank_major() const {
  auto args = begin<DispatchRankMajorArgs>();
  args.tokens = token_rows(tokens);
  args.topk_idx = tensor(topk_idx, index_dtype, {num_tokens, layer.top_k});
  args.topk_weights = token_floats(topk_weights);
  args.recv_tokens = source_rows(recv_tokens, dtype_of_recv());
  args.format = format_of(format);
  args.recv_topk_idx = source_routes(recv_topk_idx, index_dtype);
  args.recv_weights = source_routes(recv_weights, EPX_FLOAT32);
  args.counts = tensor(counts, EPX_INT32, num_ranks);
  args.row_spacing = row_spacing;
  return args;
}

CombineRankMajorArgs LayerMemory::combine_rank_major() const {
  auto args = begin<CombineRankMajorArgs>();
  args.expert_out = source_rows(expert_out);
  args.out = token_rows(out);
  args.format = format_of(sum_format);
  return args;
}

CombineRankMajorBwdArgs LayerMemory::combine_rank_major_bwd() const {
  auto args = begin<CombineRankMajorBwdArgs>();
  args.grad_out = token_rows(grad_out);
  args.grad_expert_out = source_rows(grad_expert_out, dtype_of_recv());
  args.format = format_of(format);
  return args;
}

DispatchRankMajorBwdArgs LayerMemory::dispatch_rank_major_bwd() const {
  auto args = begin<DispatchRankMajorBwdArgs>();
  args.grad_recv = source_rows(grad_recv);
  args.grad_recv_weights = source_routes(grad_weights, EPX_FLOAT32);
  args.grad_tokens = token_rows(grad_tokens);
  args.format = format_of(sum_format);
  args.grad_topk_weights = token_floats(grad_topk_weights);
  return args;
}

void LayerMemory::call(GroupView group, epx_operation operation) const {
  switch (operation) {
#define EPX_TEST_CALL(NUMBER, name, ...)                                                                                   \
  case EPX_OP_##NUMBER:                                                                                                    \
    return group.name(name());
    EPX_LAYER_OPERATIONS(EPX_TEST_CALL)
#undef EPX_TEST_CALL
  default:
    fail_check("a layer makes no call of operation {}", static_cast<int>(operation));
  }
}

epx_status LayerMemory::try_call(GroupView group, epx_operation operation) const {
  try {
    call(group, operation);
    return EPX_SUCCESS;
  } catch (const Error& error) {
    return error.status();
  }
}

} // namespace epx::test
