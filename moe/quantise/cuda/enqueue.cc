// SPDX-License-Identifier: Apache-2.0
#include "moe/quantise/cuda/enqueue.h"

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

void enqueue(const epx_moe_quantise_weights_args& args, const QuantiseWeights& quantise) {
  const CudaCall call(*args.cuda, EPX_MOE_OP_NONE, 0, // it reports no errors
                      {{args.weights, "weights"},
                       {args.codes, "codes"},
                       {args.scales, "scales"},
                       {args.transposed_codes, "transposed_codes"},
                       {args.transposed_scales, "transposed_scales"}});
  call.require_aligned(args.weights, "weights", kQuantiseAlignment);
  call.require_aligned(args.codes, "codes", kQuantiseAlignment);
  call.require_aligned(args.transposed_codes, "transposed_codes", kQuantiseAlignment);
  call.require_launched(launch_quantise_weights(quantise, call.target()));
}

} // namespace epx::moe::cuda
