// SPDX-License-Identifier: Apache-2.0
// The steps of the grouped FFN in FP8 on a GPU: each enqueues its kernel.
#pragma once

#include "moe/cuda/cuda_call.h"
#include "moe/ffn/cuda/products.h"
#include "moe/ffn/fp8/ops.h"

namespace epx::moe::cuda {

class CudaFp8Ops final : public Fp8Ops {
public:
  // The workspace is that of the products, or NULL where they do not fit tensor cores.
  CudaFp8Ops(const RowZones& zones, void* products_workspace, const CudaCall& call)
      : zones_(zones), device_zones_{zones.counts, zones.offsets, zones.num_zones, zones.num_rows},
        products_workspace_(products_workspace), call_(call) {}

  epx_dtype wide() const override { return EPX_BFLOAT16; }
  const RowZones& zones() const override { return zones_; }

  void multiply(const Fp8Rows& a, const Fp8Weights& b, const WideRows& d) const override;
  void weight_gradient(const Fp8Columns& a, const Fp8Columns& b, const ParamTensor& grad, bool accumulate) const override;
  void weight_gradient(const WideRows& a, const WideRows& b, const ParamTensor& grad, bool accumulate) const override;
  void quantise(const QuantiseRows& call) const override;
  void quantise(const QuantiseSwiglu& call) const override;
  void quantise(const QuantiseSwigluBwd& call) const override;
  void dequantise(const Fp8Rows& rows, const WideRows& wide) const override;
  void activate_bwd(const WideSwigluBwd& call) const override;

private:
  // With the codes and scales of the operands, which are rows, columns or weights.
  template <typename A, typename B>
  GroupedGemm fp8_product(Product product, const A& a, const B& b) const;
  void run(const GroupedGemm& gemm) const { call_.require_launched(launch_grouped_gemm(gemm, call_.target())); }

  RowZones zones_;
  DeviceZones device_zones_;
  void* products_workspace_;
  const CudaCall& call_;
};

} // namespace epx::moe::cuda
