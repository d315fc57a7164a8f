// SPDX-License-Identifier: Apache-2.0
// The grouped FFN's part of the C API.
#include "base/c_boundary.h"
#include "epx/epx_moe.h"
#include "moe/ffn/ffn.h"
#include "moe/tensors.h"

using namespace epx;
using namespace epx::moe;

namespace {

FfnShape require_config(const epx_moe_ffn_config* config) {
  require_struct(config, "config");
  return make_ffn_shape(*config);
}

template <typename Args>
Zones require_zones(const Args& args, const FfnShape& shape, int64_t num_rows) {
  require_tensor(args.counts, "counts", kInteger, {{"E_l", shape.num_experts}});
  require_tensor(args.offsets, "offsets", {args.counts->dtype}, {{"E_l + 1", shape.num_experts + 1}});
  const Zones zones{Integers(args.counts), Integers(args.offsets)};
  validate(zones, shape.num_experts, num_rows);
  return zones;
}

template <typename T>
void forward(const FfnShape& shape, const epx_moe_ffn_args& args) {
  const epx_dtype real = epx::kDtypeOf<T>;
  const Dim rows{"N", args.recv_tokens->sizes[0]};
  const Dim hidden{"H", shape.hidden};
  FfnForward<T> call;
  call.params = view_params<T>(shape, args.params, "params");
  call.zones = require_zones(args, shape, rows.size);
  require_tensor(args.recv_tokens, "recv_tokens", {real}, {rows, hidden});
  allow_tensor(args.recv_weights, "recv_weights", {real}, {rows});
  require_tensor(args.expert_out, "expert_out", {real}, {rows, hidden});
  allow_tensor(args.pre_act, "pre_act", {real}, {rows, {shape.has_gate() ? "2F" : "F", shape.pre_act()}});
  call.recv_tokens = data_of<T>(args.recv_tokens);
  call.recv_weights = data_of<T>(args.recv_weights);
  call.expert_out = data_of<T>(args.expert_out);
  call.pre_act = data_of<T>(args.pre_act);
  ffn_fwd(shape, call);
}

template <typename T>
void backward(const FfnShape& shape, const epx_moe_ffn_bwd_args& args) {
  const epx_dtype real = epx::kDtypeOf<T>;
  const Dim rows{"N", args.recv_tokens->sizes[0]};
  const Dim hidden{"H", shape.hidden};
  FfnBackward<T> call;
  call.params = view_params<T>(shape, args.params, "params");
  call.zones = require_zones(args, shape, rows.size);
  require_tensor(args.recv_tokens, "recv_tokens", {real}, {rows, hidden});
  allow_tensor(args.recv_weights, "recv_weights", {real}, {rows});
  require_tensor(args.pre_act, "pre_act", {real}, {rows, {shape.has_gate() ? "2F" : "F", shape.pre_act()}});
  require_tensor(args.grad_expert_out, "grad_expert_out", {real}, {rows, hidden});
  require_tensor(args.grad_recv, "grad_recv", {real}, {rows, hidden});
  allow_tensor(args.grad_recv_weights, "grad_recv_weights", {real}, {rows});
  if (args.grad_recv_weights != nullptr && args.recv_weights == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "grad_recv_weights is given, but recv_weights is NULL: without early weighting it has no gradient here");
  if (args.accumulate != 0 && args.accumulate != 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "accumulate is {}; it must be 0 or 1", args.accumulate);
  call.grads = view_grads<T>(shape, call.params, args.grads, "grads");
  call.recv_tokens = data_of<T>(args.recv_tokens);
  call.recv_weights = data_of<T>(args.recv_weights);
  call.pre_act = data_of<T>(args.pre_act);
  call.grad_expert_out = data_of<T>(args.grad_expert_out);
  call.grad_recv = data_of<T>(args.grad_recv);
  call.grad_recv_weights = data_of<T>(args.grad_recv_weights);
  call.accumulate = args.accumulate == 1;
  ffn_bwd(shape, call);
}

// The tensor that tells in which type to compute.
epx_dtype require_rows(const epx_tensor* recv_tokens, const FfnShape& shape) {
  require_tensor(recv_tokens, "recv_tokens", kReal, {{"N", kAnySize}, {"H", shape.hidden}});
  return recv_tokens->dtype;
}

} // namespace

epx_status epx_moe_ffn_config_init(epx_moe_ffn_config* config) {
  return at_c_boundary(__func__, [&] {
    if (config == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "config is NULL");
    *config = {};
    config->struct_size = sizeof(*config);
  });
}

epx_status epx_moe_ffn(const epx_moe_ffn_config* config, const epx_moe_ffn_args* args) {
  return at_c_boundary(__func__, [&] {
    const FfnShape shape = require_config(config);
    require_host_args(args);
    with_real(require_rows(args->recv_tokens, shape), [&]<typename T>(T) { forward<T>(shape, *args); });
  });
}

epx_status epx_moe_ffn_bwd(const epx_moe_ffn_config* config, const epx_moe_ffn_bwd_args* args) {
  return at_c_boundary(__func__, [&] {
    const FfnShape shape = require_config(config);
    require_host_args(args);
    with_real(require_rows(args->recv_tokens, shape), [&]<typename T>(T) { backward<T>(shape, *args); });
  });
}
