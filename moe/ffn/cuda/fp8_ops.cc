// SPDX-License-Identifier: Apache-2.0
#include "moe/ffn/cuda/fp8_ops.h"

#include "moe/ffn/cuda/kernels.h"
#include "moe/quantise/cuda/kernels.h"

namespace epx::moe::cuda {

template <typename A, typename B>
GroupedGemm CudaFp8Ops::fp8_product(Product product, const A& a, const B& b) const {
  GroupedGemm gemm{.product = product, .zones = device_zones_, .in_dtype = EPX_FLOAT8_E4M3, .out_dtype = EPX_BFLOAT16};
  gemm.a = a.codes;
  gemm.a_scales = a.scales;
  gemm.b = b.codes;
  gemm.b_scales = b.scales;
  gemm.tensor_core_workspace = products_workspace_;
  return gemm;
}

void CudaFp8Ops::multiply(const Fp8Rows& a, const Fp8Weights& b, const WideRows& d) const {
  GroupedGemm gemm = fp8_product(Product::kRowsByWeight, a, b);
  gemm.n = d.columns;
  gemm.k = a.columns;
  gemm.a_stride = a.columns;
  gemm.b_stride = d.columns * a.columns;
  gemm.d = d.data;
  gemm.d_stride = d.columns;
  run(gemm);
}

void CudaFp8Ops::weight_gradient(const Fp8Columns& a, const Fp8Columns& b, const ParamTensor& grad, bool accumulate) const {
  GroupedGemm gemm = fp8_product(Product::kWeightGradient, a, b);
  gemm.m = a.columns;
  gemm.n = b.columns;
  gemm.a_stride = zones_.num_rows;
  gemm.b_stride = zones_.num_rows;
  gemm.d = grad.data;
  gemm.d_stride = grad.stride;
  gemm.out_dtype = grad.dtype;
  gemm.accumulate = accumulate;
  run(gemm);
}

void CudaFp8Ops::weight_gradient(const WideRows& a, const WideRows& b, const ParamTensor& grad, bool accumulate) const {
  Products(wide(), device_zones_, products_workspace_, call_)
      .weight_gradient({a.data, a.columns}, {b.data, b.columns}, a.columns, b.columns, grad, accumulate);
}

void CudaFp8Ops::quantise(const QuantiseRows& call) const {
  call_.require_launched(launch_quantise_rows(call, call_.target()));
}

void CudaFp8Ops::quantise(const QuantiseSwiglu& call) const {
  call_.require_launched(launch_quantise_swiglu(call, call_.target()));
}

void CudaFp8Ops::quantise(const QuantiseSwigluBwd& call) const {
  call_.require_launched(launch_quantise_swiglu_bwd(call, call_.target()));
}

void CudaFp8Ops::dequantise(const Fp8Rows& rows, const WideRows& wide_rows) const {
  call_.require_launched(
      launch_dequantise_rows({zones_, rows.columns, rows.codes, rows.scales, wide(), wide_rows.data}, call_.target()));
}

void CudaFp8Ops::activate_bwd(const WideSwigluBwd& call) const {
  ActivateBwd activate{.layer = {wide(), EPX_MOE_SWIGLU, call.h.columns, device_zones_, call.recv_weights}};
  activate.pre_act = call.pre_act;
  activate.grad_h = call.grad_h;
  activate.grad_pre_act = call.grad_pre_act.data;
  activate.h = call.h.data;
  activate.grad_recv_weights = call.grad_recv_weights;
  call_.require_launched(launch_activate_bwd(activate, call_.target()));
}

} // namespace epx::moe::cuda
