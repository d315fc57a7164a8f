// SPDX-License-Identifier: Apache-2.0
#include "moe/ffn/cuda/enqueue.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "moe/cuda/cuda_call.h"
#include "moe/ffn/cuda/fp8_ops.h"
#include "moe/ffn/cuda/kernels.h"
#include "moe/ffn/workspace.h"

namespace epx::moe::cuda {
namespace {

struct Member {
  const epx_tensor* epx_moe_ffn_params::*tensor;
  const char* name;
};
constexpr Member kWeights[] = {{&epx_moe_ffn_params::gate_up_weight, "gate_up_weight"},
                               {&epx_moe_ffn_params::gate_weight, "gate_weight"},
                               {&epx_moe_ffn_params::up_weight, "up_weight"},
                               {&epx_moe_ffn_params::down_weight, "down_weight"}};
constexpr Member kBiases[] = {{&epx_moe_ffn_params::gate_up_bias, "gate_up_bias"},
                              {&epx_moe_ffn_params::gate_bias, "gate_bias"},
                              {&epx_moe_ffn_params::up_bias, "up_bias"},
                              {&epx_moe_ffn_params::down_bias, "down_bias"}};

void require_memory_of(const CudaCall& call, const epx_moe_ffn_params* params, const char* name) {
  if (params == nullptr) return;
  const auto require = [&](const Member& member) {
    call.require_memory(params->*member.tensor, fmt::format("{}.{}", name, member.name).c_str());
  };
  std::for_each(std::begin(kWeights), std::end(kWeights), require);
  std::for_each(std::begin(kBiases), std::end(kBiases), require);
}

// The tensors of a call's products are aligned where they fit tensor cores, whether this GPU and this build have these or not:
// what is refused, and which kernels run, follows from the dtype and the shape.
class AlignmentCheck {
public:
  AlignmentCheck(const CudaCall& call, const FfnShape& shape, const epx_tensor& recv_tokens)
      : call_(call), is_needed_(fits_tensor_cores(recv_tokens.dtype, shape.hidden, shape.inner, recv_tokens.sizes[0])) {}

  void require(const epx_tensor* tensor, const char* name) const {
    if (is_needed_) call_.require_aligned(tensor, name, kTmaAlignment);
  }
  void require_weights(const epx_moe_ffn_params* params, const char* name) const {
    if (params == nullptr) return;
    for (const Member& member : kWeights)
      require(params->*member.tensor, fmt::format("{}.{}", name, member.name).c_str());
  }

private:
  const CudaCall& call_;
  bool is_needed_;
};

// Throws unless the tensors of a call in FP8 are memory of the device, aligned for TMA.
void require_fp8_memory(const CudaCall& call, const char* owner, std::initializer_list<NamedTensor> tensors) {
  for (const NamedTensor& named : tensors) {
    const std::string name = owner != nullptr ? fmt::format("{}.{}", owner, named.name) : named.name;
    call.require_memory(named.tensor, name.c_str());
    call.require_aligned(named.tensor, name.c_str(), kTmaAlignment);
  }
}

template <typename Call>
void enqueue_fp8(const FfnShape& shape, const Call& fp8, const RowZones& zones, int64_t zone_alignment,
                 const CudaCall& call) {
  call.require_launched(launch_check_zones({zones.counts, zones.offsets, zones.num_zones, zones.num_rows}, call.errors(),
                                           call.target(), zone_alignment));
  auto* const scratch = static_cast<std::byte*>(call.workspace());
  run(shape, fp8, CudaFp8Ops(zones, fp8_products_workspace(shape, zones.num_rows, scratch), call), scratch);
}

} // namespace

CudaCall make_call(const FfnShape& shape, const epx_moe_ffn_args& args) {
  const epx_dtype dtype = args.recv_tokens->dtype;
  const int64_t rows = args.recv_tokens->sizes[0];
  CudaCall call(*args.cuda, EPX_MOE_OP_FFN, ffn_fwd_bytes(shape, dtype, rows, args.pre_act != nullptr),
                {{args.recv_tokens, "recv_tokens"},
                 {args.counts, "counts"},
                 {args.offsets, "offsets"},
                 {args.recv_weights, "recv_weights"},
                 {args.expert_out, "expert_out"},
                 {args.pre_act, "pre_act"}});
  require_memory_of(call, args.params, "params");
  const AlignmentCheck alignment(call, shape, *args.recv_tokens);
  alignment.require(args.recv_tokens, "recv_tokens");
  alignment.require_weights(args.params, "params");
  alignment.require(args.expert_out, "expert_out");
  alignment.require(args.pre_act, "pre_act");
  return call;
}

CudaCall make_call(const FfnShape& shape, const epx_moe_ffn_bwd_args& args) {
  const epx_dtype dtype = args.recv_tokens->dtype;
  const int64_t rows = args.recv_tokens->sizes[0];
  CudaCall call(*args.cuda, EPX_MOE_OP_FFN_BWD, ffn_bwd_bytes(shape, dtype, rows),
                {{args.recv_tokens, "recv_tokens"},
                 {args.counts, "counts"},
                 {args.offsets, "offsets"},
                 {args.recv_weights, "recv_weights"},
                 {args.pre_act, "pre_act"},
                 {args.grad_expert_out, "grad_expert_out"},
                 {args.grad_recv, "grad_recv"},
                 {args.grad_recv_weights, "grad_recv_weights"}});
  require_memory_of(call, args.params, "params");
  require_memory_of(call, args.grads, "grads");
  const AlignmentCheck alignment(call, shape, *args.recv_tokens);
  alignment.require(args.recv_tokens, "recv_tokens");
  alignment.require_weights(args.params, "params");
  alignment.require(args.pre_act, "pre_act");
  alignment.require(args.grad_expert_out, "grad_expert_out");
  alignment.require(args.grad_recv, "grad_recv");
  alignment.require_weights(args.grads, "grads");
  return call;
}

CudaCall make_call(const epx_moe_ffn_fp8_args& args, const char* params_name, size_t workspace_bytes) {
  CudaCall call(*args.cuda, EPX_MOE_OP_FFN_FP8, workspace_bytes,
                {{args.counts, "counts"}, {args.offsets, "offsets"}, {args.recv_weights, "recv_weights"}});
  const epx_moe_fp8_params& params = *args.params;
  require_fp8_memory(call, params_name,
                     {{params.gate_up_codes, "gate_up_codes"},
                      {params.gate_up_scales, "gate_up_scales"},
                      {params.down_codes, "down_codes"},
                      {params.down_scales, "down_scales"}});
  require_fp8_memory(call, nullptr,
                     {{args.recv_tokens, "recv_tokens"},
                      {args.recv_scales, "recv_scales"},
                      {args.expert_out, "expert_out"},
                      {args.pre_act, "pre_act"}});
  return call;
}

CudaCall make_call(const epx_moe_ffn_fp8_bwd_args& args, const char* params_name, size_t workspace_bytes) {
  CudaCall call(*args.cuda, EPX_MOE_OP_FFN_FP8_BWD, workspace_bytes,
                {{args.counts, "counts"},
                 {args.offsets, "offsets"},
                 {args.recv_weights, "recv_weights"},
                 {args.grad_recv_weights, "grad_recv_weights"}});
  const epx_moe_fp8_params& params = *args.params;
  require_fp8_memory(call, params_name,
                     {{params.gate_up_transposed_codes, "gate_up_transposed_codes"},
                      {params.gate_up_transposed_scales, "gate_up_transposed_scales"},
                      {params.down_transposed_codes, "down_transposed_codes"},
                      {params.down_transposed_scales, "down_transposed_scales"}});
  require_fp8_memory(call, nullptr,
                     {{args.recv_tokens, "recv_tokens"},
                      {args.recv_scales, "recv_scales"},
                      {args.pre_act, "pre_act"},
                      {args.grad_expert_out, "grad_expert_out"},
                      {args.grad_scales, "grad_scales"},
                      {args.grad_recv, "grad_recv"}});
  if (args.grads != nullptr)
    require_fp8_memory(call, "grads",
                       {{args.grads->gate_up_weight, "gate_up_weight"}, {args.grads->down_weight, "down_weight"}});
  return call;
}

void enqueue(const FfnShape& shape, const Fp8Forward& forward, const RowZones& zones, int64_t zone_alignment,
             const CudaCall& call) {
  enqueue_fp8(shape, forward, zones, zone_alignment, call);
}

void enqueue(const FfnShape& shape, const Fp8Backward& backward, const RowZones& zones, int64_t zone_alignment,
             const CudaCall& call) {
  enqueue_fp8(shape, backward, zones, zone_alignment, call);
}

} // namespace epx::moe::cuda
