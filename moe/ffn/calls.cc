// SPDX-License-Identifier: Apache-2.0
#include "moe/ffn/calls.h"

#include <initializer_list>

#include "moe/ffn/cuda/enqueue.h"

namespace epx::moe {
namespace {

// The dtypes of a call's tensors, which follow from those of its rows.
struct CallDtypes {
  epx_dtype rows;
  epx_dtype row_weights;
  ParamDtypes params;
  ParamDtypes grads;
};

template <epx_dtype kRows>
CallDtypes cuda_dtypes() {
  static constexpr std::initializer_list<epx_dtype> kParams = {kRows};
  static constexpr std::initializer_list<epx_dtype> kEither = {kRows, EPX_FLOAT32};
  return {kRows, EPX_FLOAT32, {kParams, kEither}, {kEither, kEither}};
}

CallDtypes dtypes_of(epx_dtype rows, Place place) {
  if (place == Place::host)
    return with_real(rows, [&]<typename T>(T) { return CallDtypes{rows, rows, kHostDtypes<T>, kHostDtypes<T>}; });
  if (rows == EPX_BFLOAT16) return cuda_dtypes<EPX_BFLOAT16>();
  if (rows == EPX_FLOAT16) return cuda_dtypes<EPX_FLOAT16>();
  return cuda_dtypes<EPX_FLOAT32>();
}

CallDtypes require_rows_of(const epx_tensor* recv_tokens, const FfnShape& shape, Place place) {
  require_rows(recv_tokens, shape, place);
  return dtypes_of(recv_tokens->dtype, place);
}

template <typename Args>
void require_zones(const Args& args, const FfnShape& shape) {
  require_tensor(args.counts, "counts", kInteger, {{"E_l", shape.num_experts}});
  require_tensor(args.offsets, "offsets", {args.counts->dtype}, {{"E_l + 1", shape.num_experts + 1}});
}

// The zones on the host, whose values can be looked at.
template <typename Args>
Zones host_zones(const Args& args, const FfnShape& shape) {
  const Zones zones{Integers(args.counts), Integers(args.offsets)};
  validate(zones, shape.num_experts, args.recv_tokens->sizes[0]);
  return zones;
}

Dim pre_act_columns(const FfnShape& shape) {
  return {shape.has_gate() ? "2F" : "F", shape.pre_act()};
}

// Gradients are added up in fp32; on the host they are of the type that it computes in.
void require_sums(const epx_moe_ffn_params* grads, const ParamTensors& tensors) {
  if (grads == nullptr) return;
  for (const ParamTensor& grad :
       {tensors.gate, tensors.up, tensors.down, tensors.gate_bias, tensors.up_bias, tensors.down_bias})
    if (grad && grad.dtype != EPX_FLOAT32)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "accumulate is 1, but a tensor of grads is {}; on CUDA gradients are added up in float32", name_of(grad.dtype));
}

} // namespace

void require_rows(const epx_tensor* recv_tokens, const FfnShape& shape, Place place) {
  require_tensor(recv_tokens, "recv_tokens", place == Place::cuda ? kCudaRows : kReal,
                 {{"N", kAnySize}, {"H", shape.hidden}});
}

CheckedFfn::CheckedFfn(const FfnShape& shape, const epx_moe_ffn_args* args, FfnOutputs outputs) : shape_(shape) {
  const Place place = require_args(args);
  args_ = *args;
  const CallDtypes dtypes = require_rows_of(args_.recv_tokens, shape, place);
  const Dim rows{"N", args_.recv_tokens->sizes[0]};
  params_ = read_params(shape, args_.params, "params", dtypes.params);
  require_zones(args_, shape);
  allow_tensor(args_.recv_weights, "recv_weights", {dtypes.row_weights}, {rows});
  if (outputs == FfnOutputs::all)
    require_tensor(args_.expert_out, "expert_out", {dtypes.rows}, {rows, {"H", shape.hidden}});
  allow_tensor(args_.pre_act, "pre_act", {dtypes.rows}, {rows, pre_act_columns(shape)});
  if (place == Place::cuda) enqueue_on_cuda([&](auto) { cuda_.emplace(cuda::make_call(shape, args_)); });
}

void CheckedFfn::run() const {
  if (cuda_) return enqueue_on_cuda([&](auto) { cuda::enqueue(shape_, params_, args_, *cuda_); });
  const Zones zones = host_zones(args_, shape_);
  with_real(args_.recv_tokens->dtype, [&]<typename T>(T) { ffn_fwd<T>(shape_, params_, zones, args_); });
}

CheckedFfnBwd::CheckedFfnBwd(const FfnShape& shape, const epx_moe_ffn_bwd_args* args) : shape_(shape) {
  const Place place = require_args(args);
  args_ = *args;
  const CallDtypes dtypes = require_rows_of(args_.recv_tokens, shape, place);
  const Dim rows{"N", args_.recv_tokens->sizes[0]};
  const Dim hidden{"H", shape.hidden};
  params_ = read_params(shape, args_.params, "params", dtypes.params);
  require_zones(args_, shape);
  allow_tensor(args_.recv_weights, "recv_weights", {dtypes.row_weights}, {rows});
  require_tensor(args_.pre_act, "pre_act", {dtypes.rows}, {rows, pre_act_columns(shape)});
  require_tensor(args_.grad_expert_out, "grad_expert_out", {dtypes.rows}, {rows, hidden});
  require_tensor(args_.grad_recv, "grad_recv", {dtypes.rows}, {rows, hidden});
  allow_tensor(args_.grad_recv_weights, "grad_recv_weights", {dtypes.row_weights}, {rows});
  if (args_.grad_recv_weights != nullptr && args_.recv_weights == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "grad_recv_weights is given, but recv_weights is NULL: without early weighting it has no gradient here");
  if (args_.accumulate != 0 && args_.accumulate != 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "accumulate is {}; it must be 0 or 1", args_.accumulate);
  grads_ = read_grads(shape, params_, args_.grads, "grads", dtypes.grads);
  if (place == Place::host) return;
  if (args_.accumulate == 1) require_sums(args_.grads, grads_);
  enqueue_on_cuda([&](auto) { cuda_.emplace(cuda::make_call(shape, args_)); });
}

void CheckedFfnBwd::run() const {
  if (cuda_) return enqueue_on_cuda([&](auto) { cuda::enqueue(shape_, params_, grads_, args_, *cuda_); });
  const Zones zones = host_zones(args_, shape_);
  with_real(args_.recv_tokens->dtype, [&]<typename T>(T) { ffn_bwd<T>(shape_, params_, grads_, zones, args_); });
}

} // namespace epx::moe
