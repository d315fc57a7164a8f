// SPDX-License-Identifier: Apache-2.0
#include "moe/router/cuda/enqueue.h"

#include <cstddef>

#include "moe/cuda/cuda_call.h"
#include "moe/router/cuda/kernels.h"
#include "moe/tensors.h"

namespace epx::moe::cuda {
namespace {

Logits device_logits(const epx_tensor& logits) {
  return {logits.data, logits.dtype == EPX_BFLOAT16, logits.sizes[0]};
}

// Enqueues the sum of global_counts over the ranks; returns the place of it in the workspace.
double* enqueue_load(const CudaCall& call, const epx_tensor& global_counts) {
  auto* const load = static_cast<double*>(call.workspace());
  call.require_launched(launch_load(
      {Integers(&global_counts), global_counts.sizes[0], static_cast<int>(global_counts.sizes[1]), load, call.errors()},
      call.target()));
  return load;
}

} // namespace

CudaCall make_call(const epx_moe_router_config& config, const epx_moe_router_args& args) {
  if (config.num_groups > kMaxGroups)
    fail(EPX_ERROR_UNSUPPORTED, "num_groups is {}; on CUDA it is at most {}", config.num_groups, kMaxGroups);
  return {*args.cuda,
          EPX_MOE_OP_NONE,
          0,
          {{args.logits, "logits"},
           {args.selection_bias, "selection_bias"},
           {args.token_mask, "token_mask"},
           {args.topk_idx, "topk_idx"},
           {args.topk_weights, "topk_weights"},
           {args.info, "info"}}};
}

void enqueue(const epx_moe_router_config& config, const epx_moe_router_args& args, const CudaCall& call) {
  call.require_launched(launch_route({config, device_logits(*args.logits), data_of<float>(args.selection_bias),
                                      data_of<uint8_t>(args.token_mask), Integers(args.topk_idx),
                                      data_of<float>(args.topk_weights), data_of<int64_t>(args.info)},
                                     call.target()));
}

CudaCall make_call(const epx_moe_router_config& config, const epx_moe_router_bwd_args& args) {
  return {*args.cuda,
          EPX_MOE_OP_ROUTER_BWD,
          route_bwd_bytes(config),
          {{args.logits, "logits"},
           {args.topk_idx, "topk_idx"},
           {args.grad_topk_weights, "grad_topk_weights"},
           {args.global_counts, "global_counts"},
           {args.grad_logits, "grad_logits"}}};
}

void enqueue(const epx_moe_router_config& config, const epx_moe_router_bwd_args& args, const CudaCall& call) {
  const double* const load = args.global_counts != nullptr ? enqueue_load(call, *args.global_counts) : nullptr;
  call.require_launched(launch_route_bwd({config, device_logits(*args.logits), Integers(args.topk_idx),
                                          data_of<float>(args.grad_topk_weights), load, args.aux_loss_grad,
                                          args.grad_logits->data, call.errors()},
                                         call.target()));
}

void enqueue(const epx_moe_router_config& config, const epx_moe_aux_loss_args& args) {
  const CudaCall call(
      *args.cuda, EPX_MOE_OP_AUX_LOSS, aux_loss_bytes(args.logits->sizes[0], config.num_experts),
      {{args.logits, "logits"}, {args.topk_idx, "topk_idx"}, {args.global_counts, "global_counts"}, {args.loss, "loss"}});
  double* const load = enqueue_load(call, *args.global_counts);
  auto* const partials = reinterpret_cast<double*>(reinterpret_cast<std::byte*>(load) + load_bytes(config.num_experts));
  call.require_launched(launch_aux_loss({config, device_logits(*args.logits), Integers(args.topk_idx), load, partials,
                                         data_of<double>(args.loss), call.errors()},
                                        call.target()));
}

void enqueue(const epx_moe_bias_update_args& args) {
  const CudaCall call(*args.cuda, EPX_MOE_OP_BIAS_UPDATE, 0,
                      {{args.global_counts, "global_counts"}, {args.selection_bias, "selection_bias"}});
  call.require_launched(launch_update_bias({Integers(args.global_counts), args.global_counts->sizes[0],
                                            static_cast<int>(args.global_counts->sizes[1]), static_cast<float>(args.rate),
                                            data_of<float>(args.selection_bias), call.errors()},
                                           call.target()));
}

} // namespace epx::moe::cuda
