// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/native/native_rows.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {

NativeRows::NativeRows(const Options& options, int rank, const std::vector<int32_t>& first_experts, int64_t max_rows,
                       Memory& memory, std::unique_ptr<AllToAll> all_to_all)
    : options_(options), calls_(memory), all_to_all_(std::move(all_to_all)), rank_(rank), first_experts_(first_experts),
      max_rows_(max_rows), T_(options.tokens), K_(options.top_k), E_(options.experts) {
  first_experts_.push_back(options.experts);
  num_local_ = first_experts_[rank + 1] - first_experts_[rank];
  const auto plain = [&](int64_t count, int64_t element_bytes) {
    return Buffer::plain(memory, static_cast<size_t>(count * element_bytes));
  };
  const int64_t row = row_bytes(options), routes = T_ * K_;
  by_expert_ = {plain(E_, sizeof(int32_t)), plain(E_ + 1, sizeof(int32_t)), plain(routes, sizeof(int32_t))};
  by_local_expert_ = {plain(num_local_, sizeof(int32_t)), plain(num_local_ + 1, sizeof(int32_t)),
                      plain(max_rows, sizeof(int32_t))};
  arrived_experts_ = plain(max_rows, sizeof(int32_t));
  home_ = plain(routes, row);
  returned_ = plain(routes, row);
  arrived_ = plain(max_rows, row);
}

void NativeRows::dispatch(const epx_tensor& topk_idx, const epx_tensor& tokens, const Buffer& recv_tokens) {
  sort(topk_idx, E_, by_expert_);
  all_to_all_->gather_counts(by_expert_.counts);
  permute(home_map(), tokens, row_tensor(home_, T_ * K_)); // while the host waits for the counts
  plan();
  send_to_experts();
  if (num_local_ > 0) sort(epx_tensor_2d(arrived_experts_.data(), EPX_INT32, num_rows_, 1), num_local_, by_local_expert_);
  permute(local_map(), rows(arrived_), rows(recv_tokens));
}

void NativeRows::dispatch_rows(const epx_tensor& tokens, const Buffer& recv_tokens) {
  permute(home_map(), tokens, row_tensor(home_, T_ * K_));
  send_to_experts();
  permute(local_map(), rows(arrived_), rows(recv_tokens));
}

void NativeRows::combine(const Buffer& expert_out, const epx_tensor& topk_weights, const epx_tensor& out) {
  const epx_tensor arrival = local_map(), sorted = rows(expert_out), leaving = rows(arrived_);
  epx_moe_unpermute_args unsort{};
  unsort.row_map = &arrival;
  unsort.rows = &sorted;
  unsort.tokens = &leaving;
  if (num_rows_ > 0) calls_.run("epx_moe_unpermute", unsort, epx_moe_unpermute);
  all_to_all_->exchange(arrived_, expert_rows_, returned_, home_rows_, row_bytes(options_));

  const epx_tensor routes = home_map(), returned = row_tensor(returned_, T_ * K_);
  epx_moe_unpermute_args sum{};
  sum.row_map = &routes;
  sum.rows = &returned;
  sum.topk_weights = &topk_weights;
  sum.tokens = &out;
  if (T_ > 0) calls_.run("epx_moe_unpermute", sum, epx_moe_unpermute);
}

void NativeRows::combine_bwd(const epx_tensor& grad_out, const epx_tensor& topk_weights, const Buffer& grad_expert_out,
                             const epx_tensor& grad_topk_weights) {
  const epx_tensor routes = home_map(), returned = row_tensor(returned_, T_ * K_), grads = row_tensor(home_, T_ * K_);
  epx_moe_unpermute_bwd_args sum{};
  sum.row_map = &routes;
  sum.grad_tokens = &grad_out;
  sum.rows = &returned;
  sum.topk_weights = &topk_weights;
  sum.grad_rows = &grads;
  sum.grad_topk_weights = &grad_topk_weights;
  if (T_ > 0) calls_.run("epx_moe_unpermute_bwd", sum, epx_moe_unpermute_bwd, epx_moe_unpermute_bwd_workspace);
  send_to_experts();
  permute(local_map(), rows(arrived_), rows(grad_expert_out));
}

void NativeRows::dispatch_bwd(const Buffer& grad_recv, const epx_tensor& grad_tokens) {
  const epx_tensor arrival = local_map(), sorted = rows(grad_recv), leaving = rows(arrived_);
  epx_moe_permute_bwd_args unsort{};
  unsort.row_map = &arrival;
  unsort.grad_rows = &sorted;
  unsort.grad_tokens = &leaving;
  if (num_rows_ > 0) calls_.run("epx_moe_permute_bwd", unsort, epx_moe_permute_bwd);
  all_to_all_->exchange(arrived_, expert_rows_, home_, home_rows_, row_bytes(options_));

  const epx_tensor routes = home_map(), grad_rows = row_tensor(home_, T_ * K_);
  epx_moe_permute_bwd_args sum{};
  sum.row_map = &routes;
  sum.grad_rows = &grad_rows;
  sum.grad_tokens = &grad_tokens;
  if (T_ > 0) calls_.run("epx_moe_permute_bwd", sum, epx_moe_permute_bwd);
}

void NativeRows::plan() {
  const std::vector<int32_t>& counts = all_to_all_->wait_for_counts(); // [P, E]
  const int num_ranks = static_cast<int>(first_experts_.size()) - 1;
  home_rows_.assign(num_ranks, 0);
  expert_rows_.assign(num_ranks, 0);
  for (int peer = 0; peer < num_ranks; ++peer) {
    for (int32_t expert = first_experts_[peer]; expert < first_experts_[peer + 1]; ++expert)
      home_rows_[peer] += counts[rank_ * E_ + expert];
    for (int64_t local = 0; local < num_local_; ++local)
      expert_rows_[peer] += counts[peer * E_ + first_experts_[rank_] + local];
  }
  num_rows_ = std::reduce(expert_rows_.begin(), expert_rows_.end());
  if (num_rows_ > max_rows_)
    throw RuntimeError(fmt::format("the native way receives {} rows and has room for {}", num_rows_, max_rows_));

  const std::span<int32_t> local_experts = all_to_all_->staging(num_rows_);
  auto next = local_experts.begin();
  for (int peer = 0; peer < num_ranks; ++peer)
    for (int64_t local = 0; local < num_local_; ++local)
      next = std::fill_n(next, counts[peer * E_ + first_experts_[rank_] + local], static_cast<int32_t>(local));
  if (num_rows_ > 0) all_to_all_->upload(local_experts, arrived_experts_);
}

void NativeRows::sort(const epx_tensor& topk_idx, int64_t num_experts, Order& order) {
  const epx_tensor counts = integers(order.counts, num_experts), offsets = integers(order.offsets, num_experts + 1);
  const epx_tensor row_map = epx_tensor_2d(order.row_map.data(), EPX_INT32, topk_idx.sizes[0], topk_idx.sizes[1]);
  epx_moe_row_map_args args{};
  args.topk_idx = &topk_idx;
  args.counts = &counts;
  args.offsets = &offsets;
  args.row_map = &row_map;
  calls_.run("epx_moe_row_map", args, epx_moe_row_map, epx_moe_row_map_workspace);
}

void NativeRows::permute(const epx_tensor& row_map, const epx_tensor& tokens, const epx_tensor& rows) {
  if (rows.sizes[0] == 0) return;
  epx_moe_permute_args args{};
  args.row_map = &row_map;
  args.tokens = &tokens;
  args.rows = &rows;
  calls_.run("epx_moe_permute", args, epx_moe_permute, epx_moe_permute_workspace);
}

void NativeRows::send_to_experts() {
  all_to_all_->exchange(home_, home_rows_, arrived_, expert_rows_, row_bytes(options_));
}

epx_tensor NativeRows::row_tensor(const Buffer& buffer, int64_t count) const {
  return epx_tensor_2d(buffer.data(), options_.dtype, count, options_.hidden);
}

epx_tensor NativeRows::home_map() const {
  return epx_tensor_2d(by_expert_.row_map.data(), EPX_INT32, T_, K_);
}

epx_tensor NativeRows::local_map() const {
  return epx_tensor_2d(by_local_expert_.row_map.data(), EPX_INT32, num_rows_, 1);
}

epx_tensor NativeRows::integers(const Buffer& buffer, int64_t count) {
  return epx_tensor_1d(buffer.data(), EPX_INT32, count);
}

} // namespace epx::bench
