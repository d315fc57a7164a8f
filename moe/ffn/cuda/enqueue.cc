// SPDX-License-Identifier: Apache-2.0
#include "moe/ffn/cuda/enqueue.h"

#include <algorithm>
#include <iterator>

#include "moe/cuda/cuda_call.h"
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

} // namespace epx::moe::cuda
