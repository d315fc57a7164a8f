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
  const epx_tensor topk_idx = epx_tensor_2d(topk_idx_.data(), EPX_INT32, options_.tokens, options_.top_k);
  const epx_tensor weights = epx_tensor_2d(topk_weights_.data(), EPX_FLOAT32, options_.tokens, options_.top_k);
  epx_moe_router_args args{};
  args.logits = &data_.logits();
  args.topk_idx = &topk_idx;
  args.topk_weights = &weights;
  calls_.run("epx_moe_router", args, [&](const auto* router) { return epx_moe_router(&router_, router); });
}

void BlockPieces::ffn() {
  const epx_tensor recv_tokens = rows(measured_.by_row().recv_tokens),
                   expert_out = rows(measured_.expert_rows().expert_out);
  const epx_tensor counts = integers(measured_.counts()), offsets = integers(measured_.offsets());
  const epx_tensor pre_act =
      epx_tensor_2d(pre_act_.data(), options_.dtype, measured_.rows(), int64_t{2} * options_.block.ffn);
  epx_moe_ffn_args args{};
  args.params = &data_.params();
  args.recv_tokens = &recv_tokens;
  args.counts = &counts;
  args.offsets = &offsets;
  args.expert_out = &expert_out;
  args.pre_act = &pre_act;
  calls_.run(
      "epx_moe_ffn", args, [&](const auto* ffn) { return epx_moe_ffn(&ffn_, ffn); },
      [&](const auto* ffn, size_t* bytes) { return epx_moe_ffn_workspace(&ffn_, ffn, bytes); });
}

void BlockPieces::ffn_bwd() {
  const epx_tensor recv_tokens = rows(measured_.by_row().recv_tokens), grad_recv = rows(measured_.expert_rows().grad_recv);
  const epx_tensor grad_expert_out = rows(measured_.by_row().grad_expert_out);
  const epx_tensor counts = integers(measured_.counts()), offsets = integers(measured_.offsets());
  const epx_tensor pre_act =
      epx_tensor_2d(pre_act_.data(), options_.dtype, measured_.rows(), int64_t{2} * options_.block.ffn);
  epx_moe_ffn_bwd_args args{};
  args.params = &data_.params();
  args.recv_tokens = &recv_tokens;
  args.counts = &counts;
  args.offsets = &offsets;
  args.pre_act = &pre_act;
  args.grad_expert_out = &grad_expert_out;
  args.grad_recv = &grad_recv;
  args.grads = &data_.grads();
  calls_.run(
      "epx_moe_ffn_bwd", args, [&](const auto* ffn) { return epx_moe_ffn_bwd(&ffn_, ffn); },
      [&](const auto* ffn, size_t* bytes) { return epx_moe_ffn_bwd_workspace(&ffn_, ffn, bytes); });
}

void BlockPieces::router_bwd() {
  const epx_tensor topk_idx = epx_tensor_2d(topk_idx_.data(), EPX_INT32, options_.tokens, options_.top_k);
  const epx_tensor grads = epx_tensor_2d(grad_topk_weights_.data(), EPX_FLOAT32, options_.tokens, options_.top_k);
  epx_moe_router_bwd_args args{};
  args.logits = &data_.logits();
  args.topk_idx = &topk_idx;
  args.grad_topk_weights = &grads;
  args.grad_logits = &data_.grad_logits();
  calls_.run(
      "epx_moe_router_bwd", args, [&](const auto* router) { return epx_moe_router_bwd(&router_, router); },
      [&](const auto* router, size_t* bytes) { return epx_moe_router_bwd_workspace(&router_, router, bytes); });
}

epx_tensor BlockPieces::rows(const Buffer& buffer) const {
  return epx_tensor_2d(buffer.data(), options_.dtype, measured_.rows(), options_.hidden);
}

epx_tensor BlockPieces::integers(const Buffer& buffer) const {
  return epx_tensor_1d(buffer.data(), EPX_INT64, static_cast<int64_t>(buffer.size() / sizeof(int64_t)));
}

} // namespace epx::bench
