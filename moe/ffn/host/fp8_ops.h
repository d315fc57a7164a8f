// SPDX-License-Identifier: Apache-2.0
// The steps of the grouped FFN in FP8 on the host. Products multiply the dequantised elements in float32.
#pragma once

#include "moe/ffn/fp8/ops.h"

namespace epx::moe {

class HostFp8Ops final : public Fp8Ops {
public:
  // The zones have been checked.
  explicit HostFp8Ops(const RowZones& zones) : zones_(zones) {}

  epx_dtype wide() const override { return EPX_FLOAT32; }
  const RowZones& zones() const override { return zones_; }

  void multiply(const Fp8Rows& a, const Fp8Weights& b, const WideRows& d) const override;
  void weight_gradient(const Fp8Columns& a, const Fp8Columns& b, const ParamTensor& grad, bool accumulate) const override;
  void weight_gradient(const WideRows& a, const WideRows& b, const ParamTensor& grad, bool accumulate) const override;
  void quantise(const QuantiseRows& call) const override { epx::moe::quantise(call); }
  void quantise(const QuantiseSwiglu& call) const override { epx::moe::quantise(call); }
  void quantise(const QuantiseSwigluBwd& call) const override { epx::moe::quantise(call); }
  void dequantise(const Fp8Rows& rows, const WideRows& wide) const override;
  void activate_bwd(const WideSwigluBwd& call) const override;

private:
  RowZones zones_;
};

} // namespace epx::moe
