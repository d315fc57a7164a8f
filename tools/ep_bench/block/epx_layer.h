// SPDX-License-Identifier: Apache-2.0
// The block of libepx_moe as a layer.
#pragma once

#include <optional>
#include <string>

#include "epx/epx_moe.hpp"
#include "tools/ep_bench/block/data.h"
#include "tools/ep_bench/block/fp8_params.h"
#include "tools/ep_bench/block/layer.h"
#include "tools/ep_bench/moe_calls.h"

namespace epx::bench {

class EpxLayer final : public BlockLayer {
public:
  // Collective over the group. `data` and `memory` must outlive this. Throws epx::Error.
  EpxLayer(GroupView group, const Options& options, epx_moe_recipe recipe, epx_moe_path path, const BlockData& data,
           Memory& memory);
  EpxLayer(const EpxLayer&) = delete;
  EpxLayer& operator=(const EpxLayer&) = delete;
  ~EpxLayer() override;

  const char* name() const override {
    return name_.c_str();
  } // "block", with the recipe "block-fp8", with the path "block-ring"
  void forward() override;
  void backward() override;
  bool quantises_weights() const override { return quantised_.has_value(); }
  void quantise_weights() override { quantised_->quantise(); }
  bool can_be_captured() const override { return true; }
  void keep_memory() override {} // the arena has it all
  void release() override { block_.destroy(); }

private:
  std::optional<moe::Fp8Params> fp8_params() const;

  std::string name_;
  GroupView group_;
  const BlockData& data_;
  MoeCalls calls_;
  std::optional<BlockFp8Params> quantised_; // with a recipe in FP8
  moe::Block block_;                        // until release()
};

} // namespace epx::bench
