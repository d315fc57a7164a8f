// SPDX-License-Identifier: Apache-2.0
// The grouped FFN: each expert's two-layer network on the rows of its zone, forward and backward.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "epx/epx_moe.h"
#include "moe/ffn/params.h"
#include "moe/tensors.h"

namespace epx::moe {

struct FfnShape {
  int num_experts = 0; // E_l
  int64_t hidden = 0;  // H
  int64_t inner = 0;   // F
  epx_moe_activation activation = EPX_MOE_SWIGLU;

  bool has_gate() const { return activation == EPX_MOE_SWIGLU; }
  int64_t pre_act() const { return has_gate() ? 2 * inner : inner; } // elements of a row of pre_act
};

// Throws with the field and its value.
FfnShape make_ffn_shape(const epx_moe_ffn_config& config);

// The dtypes that parameters may have.
struct ParamDtypes {
  std::initializer_list<epx_dtype> weights, biases;
};

// Throws with the tensor's name, which starts with `name`.
ParamTensors read_params(const FfnShape& shape, const epx_moe_ffn_params* params, const char* name,
                         const ParamDtypes& dtypes);
// Reads any subset of the parameters; `grads` may be NULL.
ParamTensors read_grads(const FfnShape& shape, const ParamTensors& params, const epx_moe_ffn_params* grads,
                        const char* name, const ParamDtypes& dtypes);

// On the host all parameters are of the type that it computes in.
template <typename T>
inline constexpr std::initializer_list<epx_dtype> kOnly = {kDtypeOf<T>};
template <typename T>
inline constexpr ParamDtypes kHostDtypes = {kOnly<T>, kOnly<T>};

// Which rows belong to which expert.
struct Zones {
  Integers counts;  // [E_l]
  Integers offsets; // [E_l + 1]
};

// Throws unless the zones follow each other within num_rows rows.
void validate(const Zones& zones, int num_experts, int64_t num_rows);

// Compute on the host, in T. The args have been checked, and so have the zones. Without expert_out only pre_act is computed.
template <typename T>
void ffn_fwd(const FfnShape& shape, const ParamTensors& params, const Zones& zones, const epx_moe_ffn_args& args);
template <typename T>
void ffn_bwd(const FfnShape& shape, const ParamTensors& params, const ParamTensors& grads, const Zones& zones,
             const epx_moe_ffn_bwd_args& args);

} // namespace epx::moe
