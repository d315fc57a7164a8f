// SPDX-License-Identifier: Apache-2.0
// The experts' parameters in FP8, of a layer with a recipe.
#pragma once

#include <vector>

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

  moe::Fp8Params params() const { return args_.fp8_params; }

private:
  MoeCalls calls_;
  std::vector<Buffer> buffers_;
  moe::QuantiseParamsArgs args_;
};

} // namespace epx::bench
