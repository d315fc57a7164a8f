// SPDX-License-Identifier: Apache-2.0
// The native baseline: the same layer with the same kernels, but its rows travel as collectives alone can carry them
// (native_rows.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/ep_bench/block/data.h"
#include "tools/ep_bench/block/layer.h"
#include "tools/ep_bench/moe_calls.h"
#include "tools/ep_bench/native/native_rows.h"

namespace epx::bench {

class NativeLayer final : public BlockLayer {
public:
  // first_experts [P] has the first expert of each rank; max_rows is the most rows that this rank's experts receive. What is
  // passed by reference must outlive this.
  NativeLayer(const Options& options, int rank, const std::vector<int32_t>& first_experts, int64_t max_rows,
              const BlockData& data, Memory& memory, std::unique_ptr<AllToAll> all_to_all);

  const char* name() const override { return "native"; }
  void forward() override;
  void backward() override;
  bool can_be_captured() const override { return false; } // the host waits for the counts
  void keep_memory() override {
    calls_.keep_workspace();
    native_.keep_workspace();
  }
  void release() override {}

private:
  Tensor topk_idx() const;
  Tensor weights(const Buffer& buffer) const;
  Tensor pre_act() const;

  Options options_;
  const BlockData& data_;
  MoeCalls calls_;
  NativeRows native_;
  moe::RouterConfig router_;
  moe::FfnConfig ffn_;
  Buffer topk_idx_, topk_weights_, grad_topk_weights_;    // [T, K] int32, float, float
  Buffer recv_tokens_, expert_out_, grad_recv_, pre_act_; // [N, H], pre_act_ [N, 2F]
};

} // namespace epx::bench
