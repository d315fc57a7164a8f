// SPDX-License-Identifier: Apache-2.0
// The experts' parameters in FP8, of a layer with a recipe.
#pragma once

#include <cstdint>

#include "epx/epx_moe.hpp"
#include "tools/ep_bench/block/data.h"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/moe_calls.h"

namespace epx::bench {

class BlockFp8Params {
public:
  // `data` and `memory` must outlive this.
  BlockFp8Params(const BlockData& data, Memory& memory);

  // What a trainer does once for each step of its optimizer.
  void quantise();

  moe::Fp8Params params() const;

private:
  // One weight [E_l, R, C] in both orientations.
  struct Weight {
    Weight(const ConstTensor& weights, Memory& memory);
    moe::QuantiseWeightsArgs args() const;

    ConstTensor weights;
    Buffer code_bytes, scale_bytes, transposed_code_bytes, transposed_scale_bytes;
    Tensor codes, scales, transposed_codes, transposed_scales;
  };

  MoeCalls calls_;
  Weight gate_up_, down_;
};

} // namespace epx::bench
