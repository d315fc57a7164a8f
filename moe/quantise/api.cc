// SPDX-License-Identifier: Apache-2.0
// The quantisers' part of the C API.
#include <variant>
#include <vector>

#include "base/c_boundary.h"
#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/quantise/arguments.h"
#include "moe/quantise/cuda/enqueue.h"
#include "moe/quantise/rows.h"
#include "moe/quantise/swiglu.h"
#include "moe/quantise/weights.h"
#include "moe/tensors.h"
#include "runtime/formats/format_arguments.h"

using namespace epx;
using namespace epx::moe;

namespace {

// The scales of rows that are E4M3, which lie as those of BLOCK128 can, whatever their scaling was.
void require_scales_of_rows(const epx_moe_quantise_rows_args& args, int64_t hidden, QuantiseRows& call) {
  const bool has_scales = call.dtype == EPX_FLOAT8_E4M3;
  if (!has_scales && args.scales != nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "scales is given, but rows are {}; it must be NULL unless they are float8_e4m3",
         name_of(call.dtype));
  if (!has_scales && args.scale_layout != EPX_SCALES_ROWS)
    fail(EPX_ERROR_INVALID_ARGUMENT, "scale_layout is {}, but rows are {}; without scales it must be EPX_SCALES_ROWS (0)",
         static_cast<int>(args.scale_layout), name_of(call.dtype));
  if (!has_scales) return;
  require_scale_layout(kBlock128WithoutFloor, args.scale_layout, "scale_layout");
  call.scale_layout = {args.scale_layout, sizeof(float), hidden / kQuantiseBlock, call.zones.num_rows};
  require_scales(args.scales, "scales", {EPX_FLOAT32}, call.scale_layout);
  call.scales = data_of<const float>(args.scales);
}

// The F of pre_act [N, 2F].
Dim require_inner(const epx_tensor* pre_act) {
  require_tensor(pre_act, "pre_act", {EPX_FLOAT32, EPX_BFLOAT16}, {{"N", kAnySize}, {"2F", kAnySize}});
  const int64_t inner = pre_act->sizes[1] / 2;
  if (inner == 0 || inner % kQuantiseBlock != 0 || pre_act->sizes[1] % 2 != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "pre_act has 2F = {}; F must be a multiple of {}, and not 0", pre_act->sizes[1],
         kQuantiseBlock);
  return {"F", inner};
}

constexpr std::initializer_list<epx_dtype> kMasters = {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16};

void run(Place place, const epx_moe_cuda* cuda, std::initializer_list<CheckedWeights> all) {
  if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*cuda, all); });
  for (const CheckedWeights& weights : all)
    std::visit([](const auto& call) { quantise(call); }, weights.quantise);
}

} // namespace

epx_status epx_moe_quantise_rows(const epx_moe_quantise_rows_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    const WireFormat format = require_block_format(args->format);
    if (args->reserved0 != 0) fail(EPX_ERROR_INVALID_ARGUMENT, "reserved0 is {}; it must be 0", args->reserved0);
    require_tensor(args->rows, "rows", {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16, EPX_FLOAT8_E4M3},
                   {{"N", kAnySize}, {"H", kAnySize}});
    QuantiseRows call{};
    call.dtype = args->rows->dtype;
    call.rows = args->rows->data;
    const Dim hidden{"H", require_blocks(*args->rows, 1, "rows", "H")};
    call.zones = require_row_zones(args->counts, args->offsets, args->rows->sizes[0]);
    require_scales_of_rows(*args, hidden.size, call);
    require_wanted(args->row_codes, "row_codes", args->column_codes, "column_codes");
    call.matrix = require_matrix({args->format, args->row_codes, args->row_scales, args->column_codes, args->column_scales},
                                 format, call.zones, hidden);
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args, call); });
    validate(call.zones);
    quantise(call);
  });
}

epx_status epx_moe_quantise_swiglu(const epx_moe_quantise_swiglu_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    const WireFormat format = require_block_format(args->format);
    const Dim inner = require_inner(args->pre_act);
    QuantiseSwiglu call{};
    call.dtype = args->pre_act->dtype;
    call.pre_act = args->pre_act->data;
    call.zones = require_row_zones(args->counts, args->offsets, args->pre_act->sizes[0]);
    allow_tensor(args->recv_weights, "recv_weights", {EPX_FLOAT32}, {{"N", call.zones.num_rows}});
    call.recv_weights = data_of<const float>(args->recv_weights);
    require_wanted(args->row_codes, "row_codes", args->column_codes, "column_codes");
    call.h = require_matrix({args->format, args->row_codes, args->row_scales, args->column_codes, args->column_scales},
                            format, call.zones, inner);
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args, call); });
    validate(call.zones);
    quantise(call);
  });
}

epx_status epx_moe_quantise_swiglu_bwd(const epx_moe_quantise_swiglu_bwd_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    const WireFormat format = require_block_format(args->format);
    const Dim inner = require_inner(args->pre_act);
    QuantiseSwigluBwd call{};
    call.dtype = args->pre_act->dtype;
    call.pre_act = args->pre_act->data;
    call.zones = require_row_zones(args->counts, args->offsets, args->pre_act->sizes[0]);
    const Dim rows{"N", call.zones.num_rows};
    require_tensor(args->grad_h, "grad_h", {call.dtype}, {rows, inner});
    call.grad_h = args->grad_h->data;
    allow_tensor(args->recv_weights, "recv_weights", {EPX_FLOAT32}, {rows});
    call.recv_weights = data_of<const float>(args->recv_weights);
    if (args->row_codes == nullptr && args->column_codes == nullptr && args->h_column_codes == nullptr &&
        args->grad_recv_weights == nullptr)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "row_codes, column_codes, h_column_codes and grad_recv_weights are NULL; one of them "
           "at least must be wanted");
    call.grads = require_matrix({args->format, args->row_codes, args->row_scales, args->column_codes, args->column_scales},
                                format, call.zones, {"2F", 2 * inner.size});
    call.h = require_columns({args->h_column_codes, "h_column_codes", args->h_column_scales, "h_column_scales"}, format,
                             call.zones, inner);
    if (args->grad_recv_weights != nullptr && args->recv_weights == nullptr)
      fail(EPX_ERROR_INVALID_ARGUMENT, "grad_recv_weights is given, but recv_weights is NULL");
    allow_tensor(args->grad_recv_weights, "grad_recv_weights", {EPX_FLOAT32}, {rows});
    call.grad_recv_weights = data_of<float>(args->grad_recv_weights);
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args, call); });
    validate(call.zones);
    quantise(call);
  });
}

epx_status epx_moe_quantise_swiglu_bwd_workspace(const epx_moe_quantise_swiglu_bwd_args* args, size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    require_struct(args, "args");
    require_sizes(args->pre_act, "pre_act", {{"N", kAnySize}, {"2F", kAnySize}});
    write_workspace(bytes, args->grad_recv_weights != nullptr
                               ? tile_sums_bytes(args->pre_act->sizes[0], args->pre_act->sizes[1] / 2)
                               : 0);
  });
}

epx_status epx_moe_quantise_weights(const epx_moe_quantise_weights_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    const WeightsFormat format = require_weights_format(args->format);
    require_tensor(args->weights, "weights", kMasters, {{"E_l", kAnySize}, {"R", kAnySize}, {"C", kAnySize}});
    const CheckedWeights weights =
        require_weights({{args->weights, "weights"},
                         {args->codes, "codes"},
                         {args->scales, "scales"},
                         {args->row_scales, "row_scales"},
                         {args->transposed_codes, "transposed_codes"},
                         {args->transposed_scales, "transposed_scales"},
                         {args->transposed_row_scales, "transposed_row_scales"}},
                        format, {"E_l", args->weights->sizes[0]}, {"R", require_blocks(*args->weights, 1, "weights", "R")},
                        {"C", require_blocks(*args->weights, 2, "weights", "C")});
    run(place, args->cuda, {weights});
  });
}

epx_status epx_moe_quantise_params(const epx_moe_quantise_params_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    require_block_format(args->format);
    const WeightsFormat format = require_weights_format(args->format);
    require_tensor(args->down_weight, "down_weight", kMasters, {{"E_l", kAnySize}, {"H", kAnySize}, {"F", kAnySize}});
    const Dim experts{"E_l", args->down_weight->sizes[0]};
    const Dim hidden{"H", require_blocks(*args->down_weight, 1, "down_weight", "H")};
    const Dim inner{"F", require_blocks(*args->down_weight, 2, "down_weight", "F")};
    const Dim stacked{"2F", 2 * inner.size};
    require_tensor(args->gate_up_weight, "gate_up_weight", kMasters, {experts, stacked, hidden});
    require_struct(args->fp8_params, "fp8_params");
    const ParamsTensors made(*args->fp8_params, args->gate_up_weight, args->down_weight);
    const CheckedWeights gate_up = require_weights(made.gate_up, format, experts, stacked, hidden);
    const CheckedWeights down = require_weights(made.down, format, experts, hidden, inner);
    run(place, args->cuda, {gate_up, down});
  });
}

epx_status epx_moe_transpose_params(const epx_moe_transpose_params_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    const std::vector<CheckedTranspose> weights = require_transposes(args->fp8_params);
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args->cuda, weights); });
    for (const CheckedTranspose& weight : weights)
      transpose(weight.transpose);
  });
}
