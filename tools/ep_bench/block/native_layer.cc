// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/native_layer.h"

#include <utility>

namespace epx::bench {

NativeLayer::NativeLayer(const Options& options, int rank, const std::vector<int32_t>& first_experts, int64_t max_rows,
                         const BlockData& data, Memory& memory, std::unique_ptr<AllToAll> all_to_all)
    : options_(options), data_(data), calls_(memory),
      native_(options, rank, first_experts, max_rows, memory, std::move(all_to_all)), router_(router_config(options)) {
  const int32_t end_of_experts = rank + 1 < std::ssize(first_experts) ? first_experts[rank + 1] : options.experts;
  ffn_ = ffn_config(options, end_of_experts - first_experts[rank]);
  const auto plain = [&](int64_t count, int64_t element_bytes) {
    return Buffer::plain(memory, static_cast<size_t>(count * element_bytes));
  };
  const int64_t routes = int64_t{options.tokens} * options.top_k;
  topk_idx_ = plain(routes, sizeof(int32_t));
  topk_weights_ = plain(routes, sizeof(float));
  grad_topk_weights_ = plain(routes, sizeof(float));
  for (Buffer* buffer : {&recv_tokens_, &expert_out_, &grad_recv_})
    *buffer = plain(max_rows, row_bytes(options));
  pre_act_ = plain(max_rows, epx::row_bytes(options.dtype, int64_t{2} * options.block.ffn));
}

void NativeLayer::forward() {
  const Tensor routes = topk_idx(), topk_weights = weights(topk_weights_);
  calls_.run(moe::RouterArgs{.logits = data_.logits(), .topk_idx = routes, .topk_weights = topk_weights},
             [&](const auto& args) { moe::router(router_, args); });
  native_.dispatch(routes, data_.tokens(), recv_tokens_);
  calls_.run(
      moe::FfnArgs{.params = data_.params(),
                   .recv_tokens = native_.rows(recv_tokens_),
                   .counts = native_.counts(),
                   .offsets = native_.offsets(),
                   .expert_out = native_.rows(expert_out_),
                   .pre_act = pre_act()},
      [&](const auto& args) { moe::ffn(ffn_, args); }, [&](const auto& args) { return moe::ffn_workspace(ffn_, args); });
  native_.combine(expert_out_, topk_weights, data_.out());
}

void NativeLayer::backward() {
  const Tensor grad_topk_weights = weights(grad_topk_weights_);
  native_.combine_bwd(data_.grad_out(), weights(topk_weights_), expert_out_,
                      grad_topk_weights); // over what combine has read
  calls_.run(
      moe::FfnBwdArgs{.params = data_.params(),
                      .recv_tokens = native_.rows(recv_tokens_),
                      .counts = native_.counts(),
                      .offsets = native_.offsets(),
                      .pre_act = pre_act(),
                      .grad_expert_out = native_.rows(expert_out_),
                      .grad_recv = native_.rows(grad_recv_),
                      .grads = data_.grads()},
      [&](const auto& args) { moe::ffn_bwd(ffn_, args); },
      [&](const auto& args) { return moe::ffn_bwd_workspace(ffn_, args); });
  native_.dispatch_bwd(grad_recv_, data_.grad_tokens());
  calls_.run(
      moe::RouterBwdArgs{.logits = data_.logits(),
                         .topk_idx = topk_idx(),
                         .grad_topk_weights = grad_topk_weights,
                         .grad_logits = data_.grad_logits()},
      [&](const auto& args) { moe::router_bwd(router_, args); },
      [&](const auto& args) { return moe::router_bwd_workspace(router_, args); });
}

Tensor NativeLayer::topk_idx() const {
  return {topk_idx_.data(), EPX_INT32, {options_.tokens, options_.top_k}};
}

Tensor NativeLayer::weights(const Buffer& buffer) const {
  return {buffer.data(), EPX_FLOAT32, {options_.tokens, options_.top_k}};
}

Tensor NativeLayer::pre_act() const {
  return {pre_act_.data(), options_.dtype, {native_.num_rows(), int64_t{2} * options_.block.ffn}};
}

} // namespace epx::bench
