// SPDX-License-Identifier: Apache-2.0
#include "moe/ffn/fp8/calls.h"

#include <cstddef>
#include <memory>

#include <fmt/format.h>

#include "base/names.h"
#include "moe/ffn/cuda/enqueue.h"
#include "moe/ffn/host/fp8_ops.h"
#include "moe/quantise/arguments.h"
#include "moe/tensors.h"
#include "runtime/stages/host/rows/float_environment.h"

namespace epx::moe {
namespace {

constexpr std::initializer_list<epx_dtype> kE4m3 = {EPX_FLOAT8_E4M3};
constexpr std::initializer_list<epx_dtype> kFloat = {EPX_FLOAT32};

epx_dtype wide_at(Place place) {
  return place == Place::host ? EPX_FLOAT32 : EPX_BFLOAT16;
}

// A call's tensors, whose dimensions follow from the shape and from N.
class TensorReader {
public:
  TensorReader(const FfnShape& shape, int64_t num_rows, Place place)
      : shape_(shape), rows_{"N", num_rows}, wide_(wide_at(place)) {}

  Dim rows() const { return rows_; }
  Dim hidden() const { return {"H", shape_.hidden}; }
  Dim inner() const { return {"F", shape_.inner}; }
  Dim pre_act() const { return {"2F", shape_.pre_act()}; }

  Fp8Rows read_rows(const epx_tensor* codes, const char* codes_name, const epx_tensor* scales,
                    const char* scales_name) const {
    require_tensor(codes, codes_name, kE4m3, {rows_, hidden()});
    require_tensor(scales, scales_name, kFloat, {rows_, {"H / 128", shape_.hidden / kQuantiseBlock}});
    return {data_of<uint8_t>(codes), data_of<float>(scales), shape_.hidden};
  }

  // `name`: of the weight in epx_moe_fp8_params, which the call has under the name `params`.
  Fp8Weights read_weights(const char* params, const epx_tensor* codes, const epx_tensor* scales, const char* name, Dim n,
                          Dim k) const {
    const Dim experts{"E_l", shape_.num_experts};
    const Blocks n_blocks = blocks_of(n), k_blocks = blocks_of(k);
    require_tensor(codes, fmt::format("{}.{}_codes", params, name).c_str(), kE4m3, {experts, n, k});
    require_tensor(scales, fmt::format("{}.{}_scales", params, name).c_str(), kFloat,
                   {experts, n_blocks.dim(), k_blocks.dim()});
    return {data_of<const uint8_t>(codes), data_of<const float>(scales)};
  }

  void require_wide(const epx_tensor* tensor, const char* name, Dim columns) const {
    require_tensor(tensor, name, {wide_}, {rows_, columns});
  }
  void allow_wide(const epx_tensor* tensor, const char* name, Dim columns) const {
    allow_tensor(tensor, name, {wide_}, {rows_, columns});
  }
  void allow_weights(const epx_tensor* tensor, const char* name) const { allow_tensor(tensor, name, kFloat, {rows_}); }

  RowZones read_zones(const epx_tensor* counts, const epx_tensor* offsets) const {
    const Dim experts{"E_l", shape_.num_experts};
    require_tensor(counts, "counts", kInteger, {experts});
    require_tensor(offsets, "offsets", {counts->dtype}, {{"E_l + 1", shape_.num_experts + 1}});
    return require_row_zones(counts, offsets, rows_.size);
  }

  ParamTensors read_grads(const epx_moe_ffn_params* grads, bool accumulate) const {
    if (grads == nullptr) return {};
    require_struct(grads, "grads");
    const auto refuse = [](const epx_tensor* tensor, const char* name, const char* why) {
      if (tensor != nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "grads.{} is given; in FP8 {}", name, why);
    };
    const char* const stacked = "gate and up are stacked: gate_up_weight";
    refuse(grads->gate_weight, "gate_weight", stacked);
    refuse(grads->up_weight, "up_weight", stacked);
    const char* const no_bias = "experts have no biases";
    refuse(grads->gate_up_bias, "gate_up_bias", no_bias);
    refuse(grads->gate_bias, "gate_bias", no_bias);
    refuse(grads->up_bias, "up_bias", no_bias);
    refuse(grads->down_bias, "down_bias", no_bias);
    const std::initializer_list<epx_dtype> of_host = {EPX_FLOAT32}, of_cuda = {EPX_BFLOAT16, EPX_FLOAT32};
    const ParamDtypes dtypes = {wide_ == EPX_FLOAT32 || accumulate ? of_host : of_cuda, {}};
    return epx::moe::read_grads(shape_, {}, grads, "grads", dtypes);
  }

private:
  const FfnShape& shape_;
  Dim rows_;
  epx_dtype wide_;
};

const epx_moe_fp8_params& require_params(const epx_moe_fp8_params* params, const char* name) {
  require_struct(params, name);
  return *params;
}

// Of a call on the host, whose zones can be looked at.
void require_host_zones(const RowZones& zones, int64_t alignment) {
  validate(zones);
  for (int zone = 0; zone < zones.num_zones; ++zone)
    if (zones.counts[zone] > 0 && zones.offsets[zone] % alignment != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "offsets[{}] is {}; products in FP8 take zones that begin at multiples of {}", zone,
           zones.offsets[zone], alignment);
}

int64_t zone_alignment(const Fp8Forward&) {
  return 1;
}
int64_t zone_alignment(const Fp8Backward& call) {
  return call.recipe == EPX_MOE_RECIPE_FP8 ? kFp8ZoneAlignment : 1;
}

size_t scratch_bytes(const FfnShape& shape, const Fp8Forward& call, epx_dtype wide, int64_t num_rows) {
  return fp8_fwd_bytes(shape, wide, num_rows, call.pre_act != nullptr);
}
size_t scratch_bytes(const FfnShape& shape, const Fp8Backward& call, epx_dtype wide, int64_t num_rows) {
  return fp8_bwd_bytes(shape, wide, num_rows, call.recipe);
}

template <typename Call>
void run_checked(const FfnShape& shape, const Call& call, const RowZones& zones, const std::optional<CudaCall>& cuda) {
  if (cuda) return enqueue_on_cuda([&](auto) { cuda::enqueue(shape, call, zones, zone_alignment(call), *cuda); });
  require_host_zones(zones, zone_alignment(call));
  const host::DefaultFloatEnvironment environment; // for the steps that have none of their own
  const HostFp8Ops ops(zones);
  const auto scratch = std::make_unique_for_overwrite<std::byte[]>(scratch_bytes(shape, call, ops.wide(), zones.num_rows));
  run(shape, call, ops, scratch.get());
}

} // namespace

void require_fp8_shape(const FfnShape& shape, const char* config) {
  if (shape.activation != EPX_MOE_SWIGLU)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}.activation is {}; experts in FP8 have EPX_MOE_SWIGLU (0)", config,
         static_cast<int>(shape.activation));
  const auto require_blocks = [&](int64_t size, const char* name) {
    if (size % kQuantiseBlock != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "{}.{} is {}; products in FP8 take multiples of {}", config, name, size,
           kQuantiseBlock);
  };
  require_blocks(shape.hidden, "hidden_dim");
  require_blocks(shape.inner, "ffn_dim");
}

int64_t require_fp8_rows(const epx_tensor* recv_tokens, const FfnShape& shape) {
  require_fp8_shape(shape, "config");
  require_tensor(recv_tokens, "recv_tokens", kE4m3, {{"N", kAnySize}, {"H", shape.hidden}});
  const int64_t rows = recv_tokens->sizes[0];
  if (rows % kFp8ZoneAlignment != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "recv_tokens has N = {} rows; products in FP8 take multiples of {}", rows,
         kFp8ZoneAlignment);
  return rows;
}

void require_fp8_recipe(epx_moe_recipe recipe) {
  if (recipe != EPX_MOE_RECIPE_FP8_ACTIVATIONS && recipe != EPX_MOE_RECIPE_FP8)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "recipe is {}; it must be EPX_MOE_RECIPE_FP8_ACTIVATIONS (1) or EPX_MOE_RECIPE_FP8 (2)", static_cast<int>(recipe));
}

CheckedFp8Ffn::CheckedFp8Ffn(const FfnShape& shape, const epx_moe_ffn_fp8_args* args, const char* params_name,
                             FfnOutputs outputs)
    : shape_(shape) {
  const Place place = require_args(args);
  const TensorReader reader(shape_, require_fp8_rows(args->recv_tokens, shape_), place);
  const epx_moe_fp8_params& params = require_params(args->params, params_name);
  call_.tokens = reader.read_rows(args->recv_tokens, "recv_tokens", args->recv_scales, "recv_scales");
  call_.gate_up = reader.read_weights(params_name, params.gate_up_codes, params.gate_up_scales, "gate_up", reader.pre_act(),
                                      reader.hidden());
  zones_ = reader.read_zones(args->counts, args->offsets);
  reader.allow_weights(args->recv_weights, "recv_weights");
  reader.allow_wide(args->pre_act, "pre_act", reader.pre_act());
  if (outputs == FfnOutputs::all) {
    call_.down =
        reader.read_weights(params_name, params.down_codes, params.down_scales, "down", reader.hidden(), reader.inner());
    reader.require_wide(args->expert_out, "expert_out", reader.hidden());
    call_.expert_out = args->expert_out->data;
  }
  call_.recv_weights = data_of<const float>(args->recv_weights);
  call_.pre_act = data_of<void>(args->pre_act);
  if (place == Place::cuda)
    enqueue_on_cuda([&](auto) {
      cuda_.emplace(cuda::make_call(*args, params_name, scratch_bytes(shape_, call_, EPX_BFLOAT16, zones_.num_rows)));
    });
}

void CheckedFp8Ffn::run() const {
  run_checked(shape_, call_, zones_, cuda_);
}

CheckedFp8FfnBwd::CheckedFp8FfnBwd(const FfnShape& shape, const epx_moe_ffn_fp8_bwd_args* args, const char* params_name)
    : shape_(shape) {
  const Place place = require_args(args);
  require_fp8_recipe(args->recipe);
  const TensorReader reader(shape_, require_fp8_rows(args->recv_tokens, shape_), place);
  const epx_moe_fp8_params& params = require_params(args->params, params_name);
  call_.recipe = args->recipe;
  call_.tokens = reader.read_rows(args->recv_tokens, "recv_tokens", args->recv_scales, "recv_scales");
  call_.gate_up_transposed =
      reader.read_weights(params_name, params.gate_up_transposed_codes, params.gate_up_transposed_scales,
                          "gate_up_transposed", reader.hidden(), reader.pre_act());
  call_.down_transposed = reader.read_weights(params_name, params.down_transposed_codes, params.down_transposed_scales,
                                              "down_transposed", reader.inner(), reader.hidden());
  zones_ = reader.read_zones(args->counts, args->offsets);
  reader.allow_weights(args->recv_weights, "recv_weights");
  reader.require_wide(args->pre_act, "pre_act", reader.pre_act());
  call_.grad_expert_out = reader.read_rows(args->grad_expert_out, "grad_expert_out", args->grad_scales, "grad_scales");
  reader.require_wide(args->grad_recv, "grad_recv", reader.hidden());
  reader.allow_weights(args->grad_recv_weights, "grad_recv_weights");
  if (args->grad_recv_weights != nullptr && args->recv_weights == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "grad_recv_weights is given, but recv_weights is NULL");
  if (args->accumulate != 0 && args->accumulate != 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "accumulate is {}; it must be 0 or 1", args->accumulate);
  call_.accumulate = args->accumulate == 1;
  const ParamTensors grads = reader.read_grads(args->grads, call_.accumulate);
  call_.grad_gate_up = grads.gate;
  call_.grad_down = grads.down;
  call_.recv_weights = data_of<const float>(args->recv_weights);
  call_.pre_act = args->pre_act->data;
  call_.grad_recv = args->grad_recv->data;
  call_.grad_recv_weights = data_of<float>(args->grad_recv_weights);
  if (place == Place::cuda)
    enqueue_on_cuda([&](auto) {
      cuda_.emplace(cuda::make_call(*args, params_name, scratch_bytes(shape_, call_, EPX_BFLOAT16, zones_.num_rows)));
    });
}

void CheckedFp8FfnBwd::run() const {
  run_checked(shape_, call_, zones_, cuda_);
}

} // namespace epx::moe
