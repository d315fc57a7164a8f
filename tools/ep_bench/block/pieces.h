// SPDX-License-Identifier: Apache-2.0
// The pieces of a block that are no exchange, each as a call of its own on the tensors of a MeasuredGroup.
#pragma once

#include "tools/ep_bench/block/data.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/moe_calls.h"

namespace epx::bench {

class BlockPieces {
public:
  // `measured` has prepared and dispatched set 0. What is passed by reference must outlive this.
  BlockPieces(const Options& options, MeasuredGroup& measured, const BlockData& data, Memory& memory);

  void router();
  void ffn();
  void ffn_bwd(); // of the last ffn()
  void router_bwd();
  void keep_memory() { calls_.keep_workspace(); } // after a call of each

private:
  Tensor rows(const Buffer& buffer) const;
  Tensor integers(const Buffer& buffer) const;
  Tensor weights(const Buffer& buffer) const;
  Tensor pre_act() const;

  Options options_;
  MeasuredGroup& measured_;
  const BlockData& data_;
  MoeCalls calls_;
  moe::RouterConfig router_;
  moe::FfnConfig ffn_;
  Buffer topk_idx_, topk_weights_, grad_topk_weights_; // [T, K] int32, float, float
  Buffer pre_act_;                                     // [N, 2F]
};

} // namespace epx::bench
