// SPDX-License-Identifier: Apache-2.0
#include "moe/permute/cuda/enqueue.h"

#include "moe/cuda/cuda_call.h"
#include "moe/permute/cuda/kernels.h"
#include "moe/tensors.h"

namespace epx::moe::cuda {

void enqueue(const epx_moe_row_map_args& args) {
  const int64_t top_k = args.topk_idx->sizes[1];
  const int64_t num_routes = args.topk_idx->sizes[0] * top_k;
  const int64_t num_experts = args.counts->sizes[0];
  const int64_t alignment = args.alignment == 0 ? 1 : args.alignment;
  const CudaCall call(
      *args.cuda, EPX_MOE_OP_ROW_MAP, row_map_bytes(num_routes, num_experts),
      {{args.topk_idx, "topk_idx"}, {args.counts, "counts"}, {args.offsets, "offsets"}, {args.row_map, "row_map"}});
  auto* const workspace = static_cast<int32_t*>(call.workspace());
  call.require_launched(
      launch_row_map({Integers(args.topk_idx), num_routes, top_k, num_experts, alignment, Integers(args.counts),
                      Integers(args.offsets), data_of<int32_t>(args.row_map), workspace, workspace + 1, call.errors()},
                     call.target()));
}

void enqueue(const epx_moe_permute_args& args, const RowMap& map) {
  const CudaCall call(*args.cuda, EPX_MOE_OP_PERMUTE, owners_bytes(map.num_rows),
                      {{args.row_map, "row_map"},
                       {args.tokens, "tokens"},
                       {args.topk_weights, "topk_weights"},
                       {args.rows, "rows"},
                       {args.row_weights, "row_weights"}});
  const bool has_weights = args.topk_weights != nullptr;
  call.require_launched(
      launch_permute({map, args.tokens->data, args.rows->data, row_bytes(args.tokens->dtype, args.tokens->sizes[1]),
                      data_of<void>(args.topk_weights), data_of<void>(args.row_weights),
                      has_weights ? single_element_bytes(args.topk_weights->dtype) : 0, args.pads == EPX_PADS_ZERO,
                      static_cast<uint32_t*>(call.workspace()), call.errors()},
                     call.target()));
}

void enqueue(const epx_moe_permute_bwd_args& args, const RowMap& map) {
  const CudaCall call(*args.cuda, EPX_MOE_OP_PERMUTE_BWD, 0,
                      {{args.row_map, "row_map"},
                       {args.grad_rows, "grad_rows"},
                       {args.grad_row_weights, "grad_row_weights"},
                       {args.grad_tokens, "grad_tokens"},
                       {args.grad_topk_weights, "grad_topk_weights"}});
  call.require_launched(launch_sum({map, args.grad_rows->data, args.grad_rows->dtype, args.grad_rows->sizes[1], nullptr,
                                    args.grad_tokens->data, data_of<float>(args.grad_row_weights),
                                    data_of<float>(args.grad_topk_weights), call.errors()},
                                   call.target()));
}

void enqueue(const epx_moe_unpermute_args& args, const RowMap& map) {
  const CudaCall call(
      *args.cuda, EPX_MOE_OP_UNPERMUTE, 0,
      {{args.row_map, "row_map"}, {args.rows, "rows"}, {args.topk_weights, "topk_weights"}, {args.tokens, "tokens"}});
  call.require_launched(launch_sum({map, args.rows->data, args.rows->dtype, args.rows->sizes[1],
                                    data_of<float>(args.topk_weights), args.tokens->data, nullptr, nullptr, call.errors()},
                                   call.target()));
}

void enqueue(const epx_moe_unpermute_bwd_args& args, const RowMap& map) {
  const CudaCall call(*args.cuda, EPX_MOE_OP_UNPERMUTE_BWD, owners_bytes(map.num_rows),
                      {{args.row_map, "row_map"},
                       {args.grad_tokens, "grad_tokens"},
                       {args.rows, "rows"},
                       {args.topk_weights, "topk_weights"},
                       {args.grad_rows, "grad_rows"},
                       {args.grad_topk_weights, "grad_topk_weights"}});
  call.require_launched(launch_unpermute_bwd(
      {map, args.grad_tokens->data, args.grad_tokens->dtype, args.grad_tokens->sizes[1], data_of<float>(args.topk_weights),
       args.grad_rows->data, data_of<void>(args.rows), data_of<float>(args.grad_topk_weights),
       static_cast<uint32_t*>(call.workspace()), call.errors()},
      call.target()));
}

} // namespace epx::moe::cuda
