// SPDX-License-Identifier: Apache-2.0
// The native baseline: the same layer with the same kernels, but its exchange is what collectives alone offer. Routes are
// sorted by expert at their source, counts travel to the host, one row per route to the expert's rank, where the rows are
// sorted by local expert; the way back is the same.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/ep_bench/block/data.h"
#include "tools/ep_bench/block/layer.h"
#include "tools/ep_bench/block/moe_calls.h"
#include "tools/ep_bench/block/row_exchange.h"

namespace epx::bench {

class NativeLayer final : public BlockLayer {
public:
  // first_experts [P] has the first expert of each rank; max_rows is the most rows that this rank's experts receive. What is
  // passed by reference must outlive this.
  NativeLayer(const Options& options, int rank, const std::vector<int32_t>& first_experts, int64_t max_rows,
              const BlockData& data, Memory& memory, std::unique_ptr<RowExchange> row_exchange);

  const char* name() const override { return "native"; }
  void forward() override;
  void backward() override;
  bool can_be_captured() const override { return false; } // the host waits for the counts
  void keep_memory() override { calls_.keep_workspace(); }
  void release() override {}

private:
  // Where the rows of a sort lie.
  struct Order {
    Buffer counts, offsets; // [experts], [experts + 1] int32
    Buffer row_map;         // [routes] int32
  };

  void route();
  // Computes what goes where from all ranks' counts, and uploads the local expert of each row; rows arrive by (source, expert).
  void plan();
  // `topk_idx` [tokens, top_k].
  void sort(const epx_tensor& topk_idx, int64_t num_experts, Order& order);
  void permute(const Order& order, const epx_tensor& tokens, int64_t top_k, const epx_tensor& rows);
  void send_to_experts(const Buffer& rows, Buffer& arrived);
  void send_home(const Buffer& rows, Buffer& arrived);

  epx_tensor rows(const Buffer& buffer, int64_t count) const;
  epx_tensor map(const Order& order, int64_t tokens, int64_t top_k) const;
  epx_tensor weights(const Buffer& buffer) const;

  Options options_;
  const BlockData& data_;
  MoeCalls calls_;
  std::unique_ptr<RowExchange> row_exchange_;
  epx_moe_router_config router_;
  epx_moe_ffn_config ffn_;
  int rank_;
  std::vector<int32_t> first_experts_; // [P + 1]
  int64_t max_rows_;
  int64_t T_, K_, E_, H_;

  std::vector<int64_t> home_rows_, expert_rows_; // [P]: of this rank's routes by owner, of this rank's experts by source
  int64_t num_rows_ = 0;                         // N, of this rank's experts

  Buffer topk_idx_, topk_weights_, grad_topk_weights_; // [T, K] int32, float, float
  Buffer arrived_experts_;                             // [N] int32
  Order by_expert_, by_local_expert_;
  Buffer home_a_, home_b_, returned_;                               // [T * K, H]
  Buffer arrived_, recv_tokens_, expert_out_, grad_recv_, pre_act_; // [N, H], pre_act_ [N, 2F]
};

} // namespace epx::bench
