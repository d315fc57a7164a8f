// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine the native way: what a framework does with collectives alone. A rank sorts its routes by expert and
// gathers all ranks' counts, for which the host waits. One row per route goes to the expert's rank, where rows arrive by
// (source, expert) and are sorted by local expert: the expert-major layout without pads. The way back is the same.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "epx/epx_moe.hpp"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/moe_calls.h"
#include "tools/ep_bench/native/all_to_all.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

class NativeRows {
public:
  // first_experts [P] has the first expert of each rank; max_rows is the most rows that this rank's experts receive. `memory`
  // must outlive this. Throws RuntimeError.
  NativeRows(const Options& options, int rank, const std::vector<int32_t>& first_experts, int64_t max_rows, Memory& memory,
             std::unique_ptr<AllToAll> all_to_all);

  // Each enqueues on the memory's stream, is collective, and throws RuntimeError and epx::Error. Rows of the experts are in
  // buffers [max_rows, H], of which num_rows() are in use; tensors have the options' shapes.

  // Sorts the routes, and waits on the host for the counts. `topk_idx` [T, K] has experts only.
  void dispatch(const ConstTensor& topk_idx, const ConstTensor& tokens, const Buffer& recv_tokens);
  // Sends the rows by the plan of the last dispatch(); the host waits for nothing. So do the others.
  void dispatch_rows(const ConstTensor& tokens, const Buffer& recv_tokens);
  // Sends the rows that the last dispatch or dispatch_rows() has sorted once more, and leaves them as they arrive; sort_arrived()
  // then brings them into expert order.
  void exchange_rows() { send_to_experts(); }
  void sort_arrived(const Buffer& arrived, const Buffer& recv_tokens) {
    permute(local_map(), rows(arrived), rows(recv_tokens));
  }
  // Sums each token's rows times their weights in fp32.
  void combine(const Buffer& expert_out, const ConstTensor& topk_weights, const Tensor& out);
  // Follows the combine of the same rows.
  void combine_bwd(const ConstTensor& grad_out, const ConstTensor& topk_weights, const Buffer& grad_expert_out,
                   const Tensor& grad_topk_weights);
  void dispatch_bwd(const Buffer& grad_recv, const Tensor& grad_tokens);

  void keep_workspace() { calls_.keep_workspace(); } // calls from now on are like those before

  const Buffer& sorted_rows() const { return home_; }     // [T * K, H] by expert, after dispatch() and dispatch_rows()
  const Buffer& arrived_rows() const { return arrived_; } // [max_rows, H] by (source, expert)

  // By the last dispatch().
  std::vector<int64_t> sent_to(int source) const; // [P]: rows of a rank, by the rank that they go to
  int64_t num_rows() const { return num_rows_; }  // N, of the experts here
  Tensor rows(const Buffer& buffer) const { return row_tensor(buffer, num_rows_); }     // [N, H]
  Tensor counts() const { return integers(by_local_expert_.counts, num_local_); }       // [E_l] INT32
  Tensor offsets() const { return integers(by_local_expert_.offsets, num_local_ + 1); } // [E_l + 1] INT32

private:
  // Where the rows of a sort lie.
  struct Order {
    Buffer counts, offsets; // [experts], [experts + 1] int32
    Buffer row_map;         // [routes] int32
  };

  // Computes what goes where from all ranks' counts, and uploads the local expert of each row; rows arrive by (source, expert).
  void plan();
  // `topk_idx` [tokens, top_k].
  void sort(const ConstTensor& topk_idx, int64_t num_experts, Order& order);
  void permute(const ConstTensor& row_map, const ConstTensor& tokens, const Tensor& rows);
  void send_to_experts();

  Tensor row_tensor(const Buffer& buffer, int64_t count) const;
  Tensor home_map() const;  // [T, K]
  Tensor local_map() const; // [N, 1]
  static Tensor integers(const Buffer& buffer, int64_t count);

  Options options_;
  MoeCalls calls_;
  std::unique_ptr<AllToAll> all_to_all_;
  int rank_;
  std::vector<int32_t> first_experts_; // [P + 1]
  int64_t max_rows_;
  int64_t T_, K_, E_, num_local_;

  std::vector<int32_t> counts_;                  // [P, E]
  std::vector<int64_t> home_rows_, expert_rows_; // [P]: of this rank's routes by owner, of this rank's experts by source
  int64_t num_rows_ = 0;

  Buffer arrived_experts_; // [N] int32
  Order by_expert_, by_local_expert_;
  Buffer home_, returned_; // [T * K, H]: rows that leave, or come home in dispatch_bwd; those that combine has brought
  Buffer arrived_;         // [N, H] in the order of arrival
};

} // namespace epx::bench
