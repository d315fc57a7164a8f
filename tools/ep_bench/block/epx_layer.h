// SPDX-License-Identifier: Apache-2.0
// The block of libepx_moe as a layer.
#pragma once

#include "epx/epx_moe.hpp"
#include "tools/ep_bench/block/data.h"
#include "tools/ep_bench/block/layer.h"
#include "tools/ep_bench/moe_calls.h"

namespace epx::bench {

class EpxLayer final : public BlockLayer {
public:
  // Collective over the group. `data` and `memory` must outlive this. Throws epx::Error.
  EpxLayer(GroupView group, const Options& options, const BlockData& data, Memory& memory);
  EpxLayer(const EpxLayer&) = delete;
  EpxLayer& operator=(const EpxLayer&) = delete;
  ~EpxLayer() override;

  const char* name() const override { return "block"; }
  void forward() override;
  void backward() override;
  bool can_be_captured() const override { return true; }
  void keep_memory() override {} // the arena has it all
  void release() override { block_.destroy(); }

private:
  GroupView group_;
  const BlockData& data_;
  MoeCalls calls_;
  moe::Block block_; // until release()
};

} // namespace epx::bench
