// SPDX-License-Identifier: Apache-2.0
// The grouped products of the FFN, as its calls see them.
#pragma once

#include <cstdint>

#include "moe/cuda/cuda_call.h"
#include "moe/ffn/params.h"
#include "moe/gemm/grouped_gemm.h"

namespace epx::moe::cuda {

// The products of one call, which have their zones and dtype in common.
class Products {
public:
  Products(epx_dtype dtype, const DeviceZones& zones, void* tensor_core_workspace, const CudaCall& call)
      : dtype_(dtype), zones_(zones), tensor_core_workspace_(tensor_core_workspace), call_(call) {}

  // A matrix of a row for each row of the zones; its rows are `stride` elements apart.
  struct Rows {
    const void* data;
    int64_t stride;
  };

  // d[R, n] = a[R, k] * weight[n, k]^T
  void multiply(Rows a, const ParamTensor& weight, int64_t n, int64_t k, Rows d) const {
    GroupedGemm gemm = product_of(Product::kRowsByWeight, a, d, n);
    gemm.k = k;
    gemm.b = weight.data;
    gemm.b_stride = weight.stride;
    run(gemm);
  }
  // d[R, n] = a[R, k] * weight[k, n], or that added to d
  void multiply_transposed(Rows a, const ParamTensor& weight, int64_t n, int64_t k, Rows d, bool accumulate) const {
    GroupedGemm gemm = product_of(Product::kRowsByTransposedWeight, a, d, n);
    gemm.k = k;
    gemm.b = weight.data;
    gemm.b_stride = weight.stride;
    gemm.accumulate = accumulate;
    run(gemm);
  }
  // grad[m, n] = a[R, m]^T * b[R, n], or that added to grad
  void weight_gradient(Rows a, Rows b, int64_t m, int64_t n, const ParamTensor& grad, bool accumulate) const {
    GroupedGemm gemm = product_of(Product::kWeightGradient, a, {grad.data, grad.stride}, n);
    gemm.m = m;
    gemm.b = b.data;
    gemm.b_stride = b.stride;
    gemm.out_dtype = grad.dtype;
    gemm.accumulate = accumulate;
    run(gemm);
  }

private:
  GroupedGemm product_of(Product product, Rows a, Rows d, int64_t n) const {
    GroupedGemm gemm{.product = product, .zones = zones_, .in_dtype = dtype_, .out_dtype = dtype_};
    gemm.n = n;
    gemm.a = a.data;
    gemm.a_stride = a.stride;
    gemm.d = const_cast<void*>(d.data);
    gemm.d_stride = d.stride;
    gemm.tensor_core_workspace = tensor_core_workspace_;
    return gemm;
  }
  void run(const GroupedGemm& gemm) const { call_.require_launched(launch_grouped_gemm(gemm, call_.target())); }

  epx_dtype dtype_;
  const DeviceZones& zones_;
  void* tensor_core_workspace_; // or NULL
  const CudaCall& call_;
};

} // namespace epx::moe::cuda
