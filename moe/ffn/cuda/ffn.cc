// SPDX-License-Identifier: Apache-2.0
// The grouped FFN on a GPU: which kernels run, on which memory.
#include "base/dtypes.h"
#include "moe/ffn/cuda/enqueue.h"
#include "moe/ffn/cuda/kernels.h"
#include "moe/ffn/cuda/products.h"
#include "moe/ffn/workspace.h"

namespace epx::moe::cuda {
namespace {

void* element_at(const void* data, int64_t i, epx_dtype dtype) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(data)) + row_bytes(dtype, i);
}

template <typename Args>
DeviceZones zones_of(const FfnShape& shape, const Args& args) {
  return {Integers(args.counts), Integers(args.offsets), shape.num_experts, args.recv_tokens->sizes[0]};
}

// The columns of pre_act, or of its gradient, that belong to `up`.
Products::Rows ups_of(const FfnShape& shape, const void* pre_act, epx_dtype dtype) {
  return {element_at(pre_act, shape.pre_act() - shape.inner, dtype), shape.pre_act()};
}

} // namespace

void enqueue(const FfnShape& shape, const ParamTensors& params, const epx_moe_ffn_args& args, const CudaCall& call) {
  const epx_dtype dtype = args.recv_tokens->dtype;
  const DeviceZones zones = zones_of(shape, args);
  const auto* const recv_weights = data_of<float>(args.recv_weights);
  void* const expert_out = data_of<void>(args.expert_out);
  call.require_launched(launch_check_zones(zones, call.errors(), call.target()));
  void* pre_act = data_of<void>(args.pre_act);
  Workspace workspace(static_cast<std::byte*>(call.workspace()));
  const ForwardBuffers buffers(shape, dtype, zones.num_rows, pre_act != nullptr, workspace);
  if (pre_act == nullptr) pre_act = buffers.pre_act;
  const Products products(dtype, zones, buffers.for_products, call);
  const Products::Rows tokens{args.recv_tokens->data, shape.hidden};

  if (params.is_stacked) {
    products.multiply(tokens, params.gate, shape.pre_act(), shape.hidden, {pre_act, shape.pre_act()});
  } else {
    if (shape.has_gate()) products.multiply(tokens, params.gate, shape.inner, shape.hidden, {pre_act, shape.pre_act()});
    products.multiply(tokens, params.up, shape.inner, shape.hidden, ups_of(shape, pre_act, dtype));
  }
  const InnerLayer layer{dtype, shape.activation, shape.inner, zones, recv_weights};
  call.require_launched(launch_activate({layer, pre_act, params.gate_bias, params.up_bias, buffers.h}, call.target()));
  if (expert_out == nullptr) return;
  products.multiply({buffers.h, shape.inner}, params.down, shape.hidden, shape.inner, {expert_out, shape.hidden});
  if (params.down_bias)
    call.require_launched(
        launch_add_bias({dtype, zones, params.down_bias, recv_weights, expert_out, shape.hidden}, call.target()));
}

void enqueue(const FfnShape& shape, const ParamTensors& params, const ParamTensors& grads, const epx_moe_ffn_bwd_args& args,
             const CudaCall& call) {
  const epx_dtype dtype = args.recv_tokens->dtype;
  const DeviceZones zones = zones_of(shape, args);
  const auto* const recv_weights = data_of<float>(args.recv_weights);
  const bool accumulate = args.accumulate == 1;
  call.require_launched(launch_check_zones(zones, call.errors(), call.target()));
  Workspace workspace(static_cast<std::byte*>(call.workspace()));
  const BackwardBuffers buffers(shape, dtype, zones.num_rows, workspace);
  const Products products(dtype, zones, buffers.for_products, call);
  const Products::Rows tokens{args.recv_tokens->data, shape.hidden};
  const Products::Rows grad_out{args.grad_expert_out->data, shape.hidden};
  const Products::Rows h{buffers.h, shape.inner};
  const Products::Rows grad_h{buffers.grad_h, shape.inner};
  const Products::Rows grad_gates{buffers.grad_pre_act, shape.pre_act()}; // all of grad_pre_act where they are stacked
  const Products::Rows grad_ups = ups_of(shape, buffers.grad_pre_act, dtype);
  const Products::Rows grad_recv{args.grad_recv->data, shape.hidden};

  products.multiply_transposed(grad_out, params.down, shape.inner, shape.hidden, grad_h, false);
  ActivateBwd activate{.layer = {dtype, shape.activation, shape.inner, zones, recv_weights}};
  activate.pre_act = args.pre_act->data;
  activate.grad_h = buffers.grad_h;
  activate.grad_pre_act = buffers.grad_pre_act;
  activate.h = buffers.h;
  activate.grad_recv_weights = data_of<float>(args.grad_recv_weights);
  activate.grad_expert_out = args.grad_expert_out->data;
  activate.hidden = shape.hidden;
  activate.down_bias = params.down_bias;
  call.require_launched(launch_activate_bwd(activate, call.target()));

  if (params.is_stacked) {
    products.multiply_transposed(grad_gates, params.gate, shape.hidden, shape.pre_act(), grad_recv, false);
  } else {
    if (shape.has_gate())
      products.multiply_transposed(grad_gates, params.gate, shape.hidden, shape.inner, grad_recv, false);
    products.multiply_transposed(grad_ups, params.up, shape.hidden, shape.inner, grad_recv, shape.has_gate());
  }

  if (grads.is_stacked) {
    products.weight_gradient(grad_gates, tokens, shape.pre_act(), shape.hidden, grads.gate, accumulate);
  } else {
    if (grads.gate) products.weight_gradient(grad_gates, tokens, shape.inner, shape.hidden, grads.gate, accumulate);
    if (grads.up) products.weight_gradient(grad_ups, tokens, shape.inner, shape.hidden, grads.up, accumulate);
  }
  if (grads.down) products.weight_gradient(grad_out, h, shape.hidden, shape.inner, grads.down, accumulate);
  const auto add_up = [&](const ParamTensor& grad, Products::Rows rows, int64_t columns, const float* weights) {
    if (!grad) return;
    call.require_launched(
        launch_bias_grad({dtype, zones, weights, rows.data, rows.stride, columns, grad, accumulate}, call.target()));
  };
  add_up(grads.gate_bias, grad_gates, shape.inner, nullptr);
  add_up(grads.up_bias, grad_ups, shape.inner, nullptr);
  add_up(grads.down_bias, grad_out, shape.hidden, recv_weights);
}

} // namespace epx::moe::cuda
