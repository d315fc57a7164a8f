// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/pieces.h"

#include "tools/ep_bench/block/layer.h"

namespace epx::bench {

BlockPieces::BlockPieces(const Options& options, MeasuredGroup& measured, const BlockData& data, Memory& memory)
    : options_(options), measured_(measured), data_(data), calls_(memory), router_(router_config(options)),
      ffn_(ffn_config(options, measured.info().num_local_experts)) {
  const size_t routes = static_cast<size_t>(options.tokens) * options.top_k;
  topk_idx_ = Buffer::plain(memory, routes * sizeof(int32_t));
  topk_weights_ = Buffer::plain(memory, routes * sizeof(float));
  grad_topk_weights_ = Buffer::plain(memory, routes * sizeof(float));
  pre_act_ = Buffer::plain(
      memory, static_cast<size_t>(measured.rows() * epx::row_bytes(options.dtype, int64_t{2} * options.block.ffn)));
}

void BlockPieces::router() {
  calls_.run(moe::RouterArgs{.logits = data_.logits(),
                             .topk_idx = {topk_idx_.data(), EPX_INT32, {options_.tokens, options_.top_k}},
                             .topk_weights = weights(topk_weights_)},
             [&](const auto& args) { moe::router(router_, args); });
}

void BlockPieces::ffn() {
  calls_.run(
      moe::FfnArgs{.params = data_.params(),
                   .recv_tokens = rows(measured_.by_row().recv_tokens),
                   .counts = integers(measured_.counts()),
                   .offsets = integers(measured_.offsets()),
                   .expert_out = rows(measured_.expert_rows().expert_out),
                   .pre_act = pre_act()},
      [&](const auto& args) { moe::ffn(ffn_, args); }, [&](const auto& args) { return moe::ffn_workspace(ffn_, args); });
}

void BlockPieces::ffn_bwd() {
  calls_.run(
      moe::FfnBwdArgs{.params = data_.params(),
                      .recv_tokens = rows(measured_.by_row().recv_tokens),
                      .counts = integers(measured_.counts()),
                      .offsets = integers(measured_.offsets()),
                      .pre_act = pre_act(),
                      .grad_expert_out = rows(measured_.by_row().grad_expert_out),
                      .grad_recv = rows(measured_.expert_rows().grad_recv),
                      .grads = data_.grads()},
      [&](const auto& args) { moe::ffn_bwd(ffn_, args); },
      [&](const auto& args) { return moe::ffn_bwd_workspace(ffn_, args); });
}

void BlockPieces::router_bwd() {
  calls_.run(
      moe::RouterBwdArgs{.logits = data_.logits(),
                         .topk_idx = {topk_idx_.data(), EPX_INT32, {options_.tokens, options_.top_k}},
                         .grad_topk_weights = weights(grad_topk_weights_),
                         .grad_logits = data_.grad_logits()},
      [&](const auto& args) { moe::router_bwd(router_, args); },
      [&](const auto& args) { return moe::router_bwd_workspace(router_, args); });
}

Tensor BlockPieces::rows(const Buffer& buffer) const {
  return {buffer.data(), options_.dtype, {measured_.rows(), options_.hidden}};
}

Tensor BlockPieces::integers(const Buffer& buffer) const {
  return {buffer.data(), EPX_INT64, buffer.size() / sizeof(int64_t)};
}

Tensor BlockPieces::weights(const Buffer& buffer) const {
  return {buffer.data(), EPX_FLOAT32, {options_.tokens, options_.top_k}};
}

Tensor BlockPieces::pre_act() const {
  return {pre_act_.data(), options_.dtype, {measured_.rows(), int64_t{2} * options_.block.ffn}};
}

} // namespace epx::bench
