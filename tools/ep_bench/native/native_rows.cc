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

void NativeRows::dispatch(const ConstTensor& topk_idx, const ConstTensor& tokens, const Buffer& recv_tokens) {
  sort(topk_idx, E_, by_expert_);
  all_to_all_->gather_counts(by_expert_.counts);
  permute(home_map(), tokens, row_tensor(home_, T_ * K_)); // while the host waits for the counts
  plan();
  send_to_experts();
  if (num_local_ > 0) sort({arrived_experts_.data(), EPX_INT32, {num_rows_, 1}}, num_local_, by_local_expert_);
  permute(local_map(), rows(arrived_), rows(recv_tokens));
}

void NativeRows::dispatch_rows(const ConstTensor& tokens, const Buffer& recv_tokens) {
  permute(home_map(), tokens, row_tensor(home_, T_ * K_));
  send_to_experts();
  permute(local_map(), rows(arrived_), rows(recv_tokens));
}

void NativeRows::combine(const Buffer& expert_out, const ConstTensor& topk_weights, const Tensor& out) {
  if (num_rows_ > 0)
    calls_.run(moe::UnpermuteArgs{.row_map = local_map(), .rows = rows(expert_out), .tokens = rows(arrived_)},
               moe::unpermute);
  all_to_all_->exchange(arrived_, expert_rows_, returned_, home_rows_, row_bytes(options_));
  if (T_ > 0)
    calls_.run(
        moe::UnpermuteArgs{
            .row_map = home_map(), .rows = row_tensor(returned_, T_ * K_), .topk_weights = topk_weights, .tokens = out},
        moe::unpermute);
}

void NativeRows::combine_bwd(const ConstTensor& grad_out, const ConstTensor& topk_weights, const Buffer& grad_expert_out,
                             const Tensor& grad_topk_weights) {
  if (T_ > 0)
    calls_.run(moe::UnpermuteBwdArgs{.row_map = home_map(),
                                     .grad_tokens = grad_out,
                                     .rows = row_tensor(returned_, T_ * K_),
                                     .topk_weights = topk_weights,
                                     .grad_rows = row_tensor(home_, T_ * K_),
                                     .grad_topk_weights = grad_topk_weights},
               moe::unpermute_bwd, moe::unpermute_bwd_workspace);
  send_to_experts();
  permute(local_map(), rows(arrived_), rows(grad_expert_out));
}

void NativeRows::dispatch_bwd(const Buffer& grad_recv, const Tensor& grad_tokens) {
  if (num_rows_ > 0)
    calls_.run(moe::PermuteBwdArgs{.row_map = local_map(), .grad_rows = rows(grad_recv), .grad_tokens = rows(arrived_)},
               moe::permute_bwd);
  all_to_all_->exchange(arrived_, expert_rows_, home_, home_rows_, row_bytes(options_));
  if (T_ > 0)
    calls_.run(
        moe::PermuteBwdArgs{.row_map = home_map(), .grad_rows = row_tensor(home_, T_ * K_), .grad_tokens = grad_tokens},
        moe::permute_bwd);
}

void NativeRows::plan() {
  counts_ = all_to_all_->wait_for_counts();
  const int num_ranks = static_cast<int>(first_experts_.size()) - 1;
  home_rows_ = sent_to(rank_);
  expert_rows_.assign(num_ranks, 0);
  for (int peer = 0; peer < num_ranks; ++peer)
    expert_rows_[peer] = sent_to(peer)[rank_];
  num_rows_ = std::reduce(expert_rows_.begin(), expert_rows_.end());
  if (num_rows_ > max_rows_)
    throw RuntimeError(fmt::format("the native way receives {} rows and has room for {}", num_rows_, max_rows_));

  const std::span<int32_t> local_experts = all_to_all_->staging(num_rows_);
  auto next = local_experts.begin();
  for (int peer = 0; peer < num_ranks; ++peer)
    for (int64_t local = 0; local < num_local_; ++local)
      next = std::fill_n(next, counts_[peer * E_ + first_experts_[rank_] + local], static_cast<int32_t>(local));
  if (num_rows_ > 0) all_to_all_->upload(local_experts, arrived_experts_);
}

std::vector<int64_t> NativeRows::sent_to(int source) const {
  std::vector<int64_t> rows;
  for (size_t peer = 0; peer + 1 < first_experts_.size(); ++peer) {
    const auto* const of_source = counts_.data() + source * E_;
    rows.push_back(std::reduce(of_source + first_experts_[peer], of_source + first_experts_[peer + 1], int64_t{0}));
  }
  return rows;
}

void NativeRows::sort(const ConstTensor& topk_idx, int64_t num_experts, Order& order) {
  calls_.run(moe::RowMapArgs{.topk_idx = topk_idx,
                             .counts = integers(order.counts, num_experts),
                             .offsets = integers(order.offsets, num_experts + 1),
                             .row_map = {order.row_map.data(), EPX_INT32, {topk_idx.size(0), topk_idx.size(1)}}},
             moe::row_map, moe::row_map_workspace);
}

void NativeRows::permute(const ConstTensor& row_map, const ConstTensor& tokens, const Tensor& rows) {
  if (rows.size(0) > 0)
    calls_.run(moe::PermuteArgs{.row_map = row_map, .tokens = tokens, .rows = rows}, moe::permute, moe::permute_workspace);
}

void NativeRows::send_to_experts() {
  all_to_all_->exchange(home_, home_rows_, arrived_, expert_rows_, row_bytes(options_));
}

Tensor NativeRows::row_tensor(const Buffer& buffer, int64_t count) const {
  return {buffer.data(), options_.dtype, {count, options_.hidden}};
}

Tensor NativeRows::home_map() const {
  return {by_expert_.row_map.data(), EPX_INT32, {T_, K_}};
}

Tensor NativeRows::local_map() const {
  return {by_local_expert_.row_map.data(), EPX_INT32, {num_rows_, 1}};
}

Tensor NativeRows::integers(const Buffer& buffer, int64_t count) {
  return {buffer.data(), EPX_INT32, count};
}

} // namespace epx::bench
