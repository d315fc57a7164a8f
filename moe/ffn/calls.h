// SPDX-License-Identifier: Apache-2.0
// The calls of the grouped FFN, in two steps: the constructor checks all arguments but the data, and throws; run() computes.
// So a block checks all that it is going to call before it calls the group.
#pragma once

#include <optional>

#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/ffn/ffn.h"
#include "moe/tensors.h"

namespace epx::moe {

// Checks recv_tokens; throws.
void require_rows(const epx_tensor* recv_tokens, const FfnShape& shape, Place place);

// What a forward computes: all, or pre_act alone, with the bits that it has in all.
enum class FfnOutputs { all, pre_act };

// What the args point to must live until run() has returned.
class CheckedFfn {
public:
  // With FfnOutputs::pre_act the args need no expert_out.
  CheckedFfn(const FfnShape& shape, const epx_moe_ffn_args* args, FfnOutputs outputs = FfnOutputs::all);
  void run() const; // on the host: throws for bad data

private:
  FfnShape shape_;
  epx_moe_ffn_args args_;
  ParamTensors params_;
  std::optional<CudaCall> cuda_; // on the host: none
};

class CheckedFfnBwd {
public:
  CheckedFfnBwd(const FfnShape& shape, const epx_moe_ffn_bwd_args* args);
  void run() const; // on the host: throws for bad data

private:
  FfnShape shape_;
  epx_moe_ffn_bwd_args args_;
  ParamTensors params_, grads_;
  std::optional<CudaCall> cuda_;
};

} // namespace epx::moe
