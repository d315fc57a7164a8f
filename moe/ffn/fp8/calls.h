// SPDX-License-Identifier: Apache-2.0
// The calls of the grouped FFN in FP8, in two steps, as those of calls.h in the folder above.
#pragma once

#include <optional>

#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/ffn/calls.h"
#include "moe/ffn/ffn.h"
#include "moe/ffn/fp8/fp8_ffn.h"
#include "moe/quantise/matrix.h"

namespace epx::moe {

// Throws unless the shape is one that products in FP8 take. `config` is what the sentence calls it.
void require_fp8_shape(const FfnShape& shape, const char* config);

// Checks recv_tokens; throws. Returns N.
int64_t require_fp8_rows(const epx_tensor* recv_tokens, const FfnShape& shape);

// Throws unless it is a recipe in FP8.
void require_fp8_recipe(epx_moe_recipe recipe);

// What the args point to must live until run() has returned.
class CheckedFp8Ffn {
public:
  // With FfnOutputs::pre_act the args need no expert_out. `params_name`: what the caller calls args.params, for messages.
  CheckedFp8Ffn(const FfnShape& shape, const epx_moe_ffn_fp8_args* args, const char* params_name = "params",
                FfnOutputs outputs = FfnOutputs::all);
  void run() const; // on the host: throws for bad data

private:
  FfnShape shape_;
  RowZones zones_;
  Fp8Forward call_{};
  std::optional<CudaCall> cuda_; // on the host: none
};

class CheckedFp8FfnBwd {
public:
  CheckedFp8FfnBwd(const FfnShape& shape, const epx_moe_ffn_fp8_bwd_args* args, const char* params_name = "params");
  void run() const; // on the host: throws for bad data

private:
  FfnShape shape_;
  RowZones zones_;
  Fp8Backward call_{};
  std::optional<CudaCall> cuda_;
};

} // namespace epx::moe
