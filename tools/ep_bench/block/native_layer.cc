// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/native_layer.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {

NativeLayer::NativeLayer(const Options& options, int rank, const std::vector<int32_t>& first_experts, int64_t max_rows,
                         const BlockData& data, Memory& memory, std::unique_ptr<RowExchange> row_exchange)
    : options_(options), data_(data), calls_(memory), row_exchange_(std::move(row_exchange)),
      router_(router_config(options)), rank_(rank), first_experts_(first_experts), max_rows_(max_rows), T_(options.tokens),
      K_(options.top_k), E_(options.experts), H_(options.hidden) {
  first_experts_.push_back(options.experts);
  const int32_t local_experts = first_experts_[rank + 1] - first_experts_[rank];
  ffn_ = ffn_config(options, local_experts);
  const auto plain = [&](int64_t count, int64_t element_bytes) {
    return Buffer::plain(memory, static_cast<size_t>(count * element_bytes));
  };
  const int64_t row = row_bytes(options), routes = T_ * K_;
  topk_idx_ = plain(routes, sizeof(int32_t));
  topk_weights_ = plain(routes, sizeof(float));
  grad_topk_weights_ = plain(routes, sizeof(float));
  by_expert_ = {plain(E_, sizeof(int32_t)), plain(E_ + 1, sizeof(int32_t)), plain(routes, sizeof(int32_t))};
  by_local_expert_ = {plain(local_experts, sizeof(int32_t)), plain(local_experts + 1, sizeof(int32_t)),
                      plain(max_rows, sizeof(int32_t))};
  arrived_experts_ = plain(max_rows, sizeof(int32_t));
  for (Buffer* buffer : {&home_a_, &home_b_, &returned_})
    *buffer = plain(routes, row);
  for (Buffer* buffer : {&arrived_, &recv_tokens_, &expert_out_, &grad_recv_})
    *buffer = plain(max_rows, row);
  pre_act_ = plain(max_rows, epx::row_bytes(options.dtype, int64_t{2} * options.block.ffn));
}

void NativeLayer::forward() {
  route();
  sort(epx_tensor_2d(topk_idx_.data(), EPX_INT32, T_, K_), E_, by_expert_);
  row_exchange_->gather_counts(by_expert_.counts);
  permute(by_expert_, data_.tokens(), K_, rows(home_a_, T_ * K_)); // while the host waits for the counts
  plan();
  send_to_experts(home_a_, arrived_);
  sort(epx_tensor_2d(arrived_experts_.data(), EPX_INT32, num_rows_, 1), ffn_.num_local_experts, by_local_expert_);
  permute(by_local_expert_, rows(arrived_, num_rows_), 1, rows(recv_tokens_, num_rows_));

  const epx_tensor recv_tokens = rows(recv_tokens_, num_rows_), expert_out = rows(expert_out_, num_rows_);
  const epx_tensor counts = epx_tensor_1d(by_local_expert_.counts.data(), EPX_INT32, ffn_.num_local_experts);
  const epx_tensor offsets = epx_tensor_1d(by_local_expert_.offsets.data(), EPX_INT32, ffn_.num_local_experts + 1);
  const epx_tensor pre_act = epx_tensor_2d(pre_act_.data(), options_.dtype, num_rows_, int64_t{2} * options_.block.ffn);
  epx_moe_ffn_args ffn{};
  ffn.params = &data_.params();
  ffn.recv_tokens = &recv_tokens;
  ffn.counts = &counts;
  ffn.offsets = &offsets;
  ffn.expert_out = &expert_out;
  ffn.pre_act = &pre_act;
  calls_.run(
      "epx_moe_ffn", ffn, [&](const auto* args) { return epx_moe_ffn(&ffn_, args); },
      [&](const auto* args, size_t* bytes) { return epx_moe_ffn_workspace(&ffn_, args, bytes); });

  const epx_tensor local_map = map(by_local_expert_, num_rows_, 1), leaving = rows(arrived_, num_rows_);
  epx_moe_unpermute_args unsort{};
  unsort.row_map = &local_map;
  unsort.rows = &expert_out;
  unsort.tokens = &leaving;
  calls_.run("epx_moe_unpermute", unsort, epx_moe_unpermute);
  send_home(arrived_, returned_);

  const epx_tensor home_map = map(by_expert_, T_, K_), returned = rows(returned_, T_ * K_);
  const epx_tensor topk_weights = weights(topk_weights_);
  epx_moe_unpermute_args sum{};
  sum.row_map = &home_map;
  sum.rows = &returned;
  sum.topk_weights = &topk_weights;
  sum.tokens = &data_.out();
  calls_.run("epx_moe_unpermute", sum, epx_moe_unpermute);
}

void NativeLayer::backward() {
  const epx_tensor home_map = map(by_expert_, T_, K_), returned = rows(returned_, T_ * K_);
  const epx_tensor topk_weights = weights(topk_weights_), grad_topk_weights = weights(grad_topk_weights_);
  const epx_tensor grad_returned = rows(home_a_, T_ * K_);
  epx_moe_unpermute_bwd_args sum{};
  sum.row_map = &home_map;
  sum.grad_tokens = &data_.grad_out();
  sum.rows = &returned;
  sum.topk_weights = &topk_weights;
  sum.grad_rows = &grad_returned;
  sum.grad_topk_weights = &grad_topk_weights;
  calls_.run("epx_moe_unpermute_bwd", sum, epx_moe_unpermute_bwd, epx_moe_unpermute_bwd_workspace);
  send_to_experts(home_a_, arrived_);
  permute(by_local_expert_, rows(arrived_, num_rows_), 1, rows(expert_out_, num_rows_)); // now the gradient of expert_out

  const epx_tensor recv_tokens = rows(recv_tokens_, num_rows_), grad_expert_out = rows(expert_out_, num_rows_);
  const epx_tensor counts = epx_tensor_1d(by_local_expert_.counts.data(), EPX_INT32, ffn_.num_local_experts);
  const epx_tensor offsets = epx_tensor_1d(by_local_expert_.offsets.data(), EPX_INT32, ffn_.num_local_experts + 1);
  const epx_tensor pre_act = epx_tensor_2d(pre_act_.data(), options_.dtype, num_rows_, int64_t{2} * options_.block.ffn);
  const epx_tensor grad_recv = rows(grad_recv_, num_rows_);
  epx_moe_ffn_bwd_args ffn{};
  ffn.params = &data_.params();
  ffn.recv_tokens = &recv_tokens;
  ffn.counts = &counts;
  ffn.offsets = &offsets;
  ffn.pre_act = &pre_act;
  ffn.grad_expert_out = &grad_expert_out;
  ffn.grad_recv = &grad_recv;
  ffn.grads = &data_.grads();
  calls_.run(
      "epx_moe_ffn_bwd", ffn, [&](const auto* args) { return epx_moe_ffn_bwd(&ffn_, args); },
      [&](const auto* args, size_t* bytes) { return epx_moe_ffn_bwd_workspace(&ffn_, args, bytes); });

  const epx_tensor local_map = map(by_local_expert_, num_rows_, 1), leaving = rows(arrived_, num_rows_);
  epx_moe_permute_bwd_args unsort{};
  unsort.row_map = &local_map;
  unsort.grad_rows = &grad_recv;
  unsort.grad_tokens = &leaving;
  calls_.run("epx_moe_permute_bwd", unsort, epx_moe_permute_bwd);
  send_home(arrived_, home_b_);

  const epx_tensor grad_rows = rows(home_b_, T_ * K_);
  epx_moe_permute_bwd_args home{};
  home.row_map = &home_map;
  home.grad_rows = &grad_rows;
  home.grad_tokens = &data_.grad_tokens();
  calls_.run("epx_moe_permute_bwd", home, epx_moe_permute_bwd);

  const epx_tensor topk_idx = epx_tensor_2d(topk_idx_.data(), EPX_INT32, T_, K_);
  epx_moe_router_bwd_args router{};
  router.logits = &data_.logits();
  router.topk_idx = &topk_idx;
  router.grad_topk_weights = &grad_topk_weights;
  router.grad_logits = &data_.grad_logits();
  calls_.run(
      "epx_moe_router_bwd", router, [&](const auto* args) { return epx_moe_router_bwd(&router_, args); },
      [&](const auto* args, size_t* bytes) { return epx_moe_router_bwd_workspace(&router_, args, bytes); });
}

void NativeLayer::route() {
  const epx_tensor topk_idx = epx_tensor_2d(topk_idx_.data(), EPX_INT32, T_, K_), topk_weights = weights(topk_weights_);
  epx_moe_router_args args{};
  args.logits = &data_.logits();
  args.topk_idx = &topk_idx;
  args.topk_weights = &topk_weights;
  calls_.run("epx_moe_router", args, [&](const auto* router) { return epx_moe_router(&router_, router); });
}

void NativeLayer::plan() {
  const std::vector<int32_t>& counts = row_exchange_->wait_for_counts(); // [P, E]
  const int num_ranks = static_cast<int>(first_experts_.size()) - 1;
  home_rows_.assign(num_ranks, 0);
  expert_rows_.assign(num_ranks, 0);
  for (int peer = 0; peer < num_ranks; ++peer) {
    for (int32_t expert = first_experts_[peer]; expert < first_experts_[peer + 1]; ++expert)
      home_rows_[peer] += counts[rank_ * E_ + expert];
    for (int32_t local = 0; local < ffn_.num_local_experts; ++local)
      expert_rows_[peer] += counts[peer * E_ + first_experts_[rank_] + local];
  }
  num_rows_ = std::reduce(expert_rows_.begin(), expert_rows_.end());
  if (num_rows_ > max_rows_)
    throw RuntimeError(fmt::format("the native layer receives {} rows and has room for {}", num_rows_, max_rows_));

  const std::span<int32_t> local_experts = row_exchange_->staging(num_rows_);
  auto next = local_experts.begin();
  for (int peer = 0; peer < num_ranks; ++peer)
    for (int32_t local = 0; local < ffn_.num_local_experts; ++local)
      next = std::fill_n(next, counts[peer * E_ + first_experts_[rank_] + local], local);
  if (num_rows_ > 0) row_exchange_->upload(local_experts, arrived_experts_);
}

void NativeLayer::sort(const epx_tensor& topk_idx, int64_t num_experts, Order& order) {
  const epx_tensor counts = epx_tensor_1d(order.counts.data(), EPX_INT32, num_experts);
  const epx_tensor offsets = epx_tensor_1d(order.offsets.data(), EPX_INT32, num_experts + 1);
  const epx_tensor row_map = map(order, topk_idx.sizes[0], topk_idx.sizes[1]);
  epx_moe_row_map_args args{};
  args.topk_idx = &topk_idx;
  args.counts = &counts;
  args.offsets = &offsets;
  args.row_map = &row_map;
  calls_.run("epx_moe_row_map", args, epx_moe_row_map, epx_moe_row_map_workspace);
}

void NativeLayer::permute(const Order& order, const epx_tensor& tokens, int64_t top_k, const epx_tensor& rows) {
  const epx_tensor row_map = map(order, tokens.sizes[0], top_k);
  epx_moe_permute_args args{};
  args.row_map = &row_map;
  args.tokens = &tokens;
  args.rows = &rows;
  calls_.run("epx_moe_permute", args, epx_moe_permute, epx_moe_permute_workspace);
}

void NativeLayer::send_to_experts(const Buffer& rows, Buffer& arrived) {
  row_exchange_->exchange(rows.data(), home_rows_, arrived.data(), expert_rows_, row_bytes(options_));
}

void NativeLayer::send_home(const Buffer& rows, Buffer& arrived) {
  row_exchange_->exchange(rows.data(), expert_rows_, arrived.data(), home_rows_, row_bytes(options_));
}

epx_tensor NativeLayer::rows(const Buffer& buffer, int64_t count) const {
  return epx_tensor_2d(buffer.data(), options_.dtype, count, H_);
}

epx_tensor NativeLayer::map(const Order& order, int64_t tokens, int64_t top_k) const {
  return epx_tensor_2d(order.row_map.data(), EPX_INT32, tokens, top_k);
}

epx_tensor NativeLayer::weights(const Buffer& buffer) const {
  return epx_tensor_2d(buffer.data(), EPX_FLOAT32, T_, K_);
}

} // namespace epx::bench
