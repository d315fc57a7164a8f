// SPDX-License-Identifier: Apache-2.0
#include "moe/quantise/cuda/enqueue.h"

#include <variant>

#include "moe/cuda/cuda_call.h"
#include "moe/ffn/cuda/kernels.h"
#include "moe/quantise/cuda/kernels.h"

namespace epx::moe::cuda {
namespace {

// Enqueues the check of zones, which reports bad ones.
void check_zones(const CudaCall& call, const RowZones& zones) {
  if (zones.are_given)
    call.require_launched(
        launch_check_zones({zones.counts, zones.offsets, zones.num_zones, zones.num_rows}, call.errors(), call.target()));
}

// A call on the tensors of weights, which reports no errors.
template <typename AllWeights>
CudaCall call_on_weights(const epx_moe_cuda& cuda, const AllWeights& all) {
  CudaCall call(cuda, EPX_MOE_OP_NONE, 0, {});
  for (const auto& [tensors, _] : all) {
    const auto& [weights, codes, scales, row_scales, transposed_codes, transposed_scales, transposed_row_scales] = tensors;
    for (const NamedTensor& named :
         {weights, codes, scales, row_scales, transposed_codes, transposed_scales, transposed_row_scales})
      call.require_memory(named.tensor, named.name);
    for (const NamedTensor& named : {weights, codes, transposed_codes})
      call.require_aligned(named.tensor, named.name, kQuantiseAlignment);
  }
  return call;
}

} // namespace

void enqueue(const epx_moe_quantise_rows_args& args, const QuantiseRows& quantise) {
  const CudaCall call(*args.cuda, EPX_MOE_OP_QUANTISE_ROWS, 0,
                      {{args.rows, "rows"},
                       {args.scales, "scales"},
                       {args.counts, "counts"},
                       {args.offsets, "offsets"},
                       {args.row_codes, "row_codes"},
                       {args.row_scales, "row_scales"},
                       {args.column_codes, "column_codes"},
                       {args.column_scales, "column_scales"}});
  call.require_aligned(args.rows, "rows", kQuantiseAlignment);
  call.require_aligned(args.row_codes, "row_codes", kQuantiseAlignment);
  call.require_aligned(args.column_codes, "column_codes", kQuantiseAlignment);
  check_zones(call, quantise.zones);
  call.require_launched(launch_quantise_rows(quantise, call.target()));
}

void enqueue(const epx_moe_quantise_swiglu_args& args, const QuantiseSwiglu& quantise) {
  const CudaCall call(*args.cuda, EPX_MOE_OP_QUANTISE_SWIGLU, 0,
                      {{args.pre_act, "pre_act"},
                       {args.recv_weights, "recv_weights"},
                       {args.counts, "counts"},
                       {args.offsets, "offsets"},
                       {args.row_codes, "row_codes"},
                       {args.row_scales, "row_scales"},
                       {args.column_codes, "column_codes"},
                       {args.column_scales, "column_scales"}});
  call.require_aligned(args.pre_act, "pre_act", kQuantiseAlignment);
  call.require_aligned(args.row_codes, "row_codes", kQuantiseAlignment);
  call.require_aligned(args.column_codes, "column_codes", kQuantiseAlignment);
  check_zones(call, quantise.zones);
  call.require_launched(launch_quantise_swiglu(quantise, call.target()));
}

void enqueue(const epx_moe_quantise_swiglu_bwd_args& args, QuantiseSwigluBwd quantise) {
  const CudaCall call(
      *args.cuda, EPX_MOE_OP_QUANTISE_SWIGLU_BWD,
      quantise.grad_recv_weights != nullptr ? tile_sums_bytes(quantise.zones.num_rows, quantise.h.num_columns) : 0,
      {{args.pre_act, "pre_act"},
       {args.grad_h, "grad_h"},
       {args.recv_weights, "recv_weights"},
       {args.counts, "counts"},
       {args.offsets, "offsets"},
       {args.row_codes, "row_codes"},
       {args.row_scales, "row_scales"},
       {args.column_codes, "column_codes"},
       {args.column_scales, "column_scales"},
       {args.h_column_codes, "h_column_codes"},
       {args.h_column_scales, "h_column_scales"},
       {args.grad_recv_weights, "grad_recv_weights"}});
  call.require_aligned(args.pre_act, "pre_act", kQuantiseAlignment);
  call.require_aligned(args.grad_h, "grad_h", kQuantiseAlignment);
  call.require_aligned(args.row_codes, "row_codes", kQuantiseAlignment);
  call.require_aligned(args.column_codes, "column_codes", kQuantiseAlignment);
  call.require_aligned(args.h_column_codes, "h_column_codes", kQuantiseAlignment);
  check_zones(call, quantise.zones);
  if (quantise.grad_recv_weights != nullptr) quantise.tile_sums = static_cast<float*>(call.workspace());
  call.require_launched(launch_quantise_swiglu_bwd(quantise, call.target()));
}

void enqueue(const epx_moe_cuda& cuda, std::initializer_list<CheckedWeights> all) {
  const CudaCall call = call_on_weights(cuda, all);
  for (const CheckedWeights& weights : all)
    std::visit([&](const auto& quantise) { call.require_launched(launch_quantise_weights(quantise, call.target())); },
               weights.quantise);
}

void enqueue(const epx_moe_cuda& cuda, const std::vector<CheckedTranspose>& all) {
  const CudaCall call = call_on_weights(cuda, all);
  for (const CheckedTranspose& weights : all)
    call.require_launched(launch_transpose_weights(weights.transpose, call.target()));
}

} // namespace epx::moe::cuda
