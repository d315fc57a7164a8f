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
  const epx_tensor routes = topk_idx(), topk_weights = weights(topk_weights_);
  epx_moe_router_args router{};
  router.logits = &data_.logits();
  router.topk_idx = &routes;
  router.topk_weights = &topk_weights;
  calls_.run("epx_moe_router", router, [&](const auto* args) { return epx_moe_router(&router_, args); });
  native_.dispatch(routes, data_.tokens(), recv_tokens_);

  const epx_tensor recv_tokens = native_.rows(recv_tokens_), expert_out = native_.rows(expert_out_);
  const epx_tensor counts = native_.counts(), offsets = native_.offsets(), gate_up = pre_act();
  epx_moe_ffn_args ffn{};
  ffn.params = &data_.params();
  ffn.recv_tokens = &recv_tokens;
  ffn.counts = &counts;
  ffn.offsets = &offsets;
  ffn.expert_out = &expert_out;
  ffn.pre_act = &gate_up;
  calls_.run(
      "epx_moe_ffn", ffn, [&](const auto* args) { return epx_moe_ffn(&ffn_, args); },
      [&](const auto* args, size_t* bytes) { return epx_moe_ffn_workspace(&ffn_, args, bytes); });
  native_.combine(expert_out_, topk_weights, data_.out());
}

void NativeLayer::backward() {
  const epx_tensor routes = topk_idx(), grad_topk_weights = weights(grad_topk_weights_);
  native_.combine_bwd(data_.grad_out(), weights(topk_weights_), expert_out_,
                      grad_topk_weights); // over what combine has read

  const epx_tensor recv_tokens = native_.rows(recv_tokens_), grad_expert_out = native_.rows(expert_out_);
  const epx_tensor counts = native_.counts(), offsets = native_.offsets(), gate_up = pre_act();
  const epx_tensor grad_recv = native_.rows(grad_recv_);
  epx_moe_ffn_bwd_args ffn{};
  ffn.params = &data_.params();
  ffn.recv_tokens = &recv_tokens;
  ffn.counts = &counts;
  ffn.offsets = &offsets;
  ffn.pre_act = &gate_up;
  ffn.grad_expert_out = &grad_expert_out;
  ffn.grad_recv = &grad_recv;
  ffn.grads = &data_.grads();
  calls_.run(
      "epx_moe_ffn_bwd", ffn, [&](const auto* args) { return epx_moe_ffn_bwd(&ffn_, args); },
      [&](const auto* args, size_t* bytes) { return epx_moe_ffn_bwd_workspace(&ffn_, args, bytes); });
  native_.dispatch_bwd(grad_recv_, data_.grad_tokens());

  epx_moe_router_bwd_args router{};
  router.logits = &data_.logits();
  router.topk_idx = &routes;
  router.grad_topk_weights = &grad_topk_weights;
  router.grad_logits = &data_.grad_logits();
  calls_.run(
      "epx_moe_router_bwd", router, [&](const auto* args) { return epx_moe_router_bwd(&router_, args); },
      [&](const auto* args, size_t* bytes) { return epx_moe_router_bwd_workspace(&router_, args, bytes); });
}

epx_tensor NativeLayer::topk_idx() const {
  return epx_tensor_2d(topk_idx_.data(), EPX_INT32, options_.tokens, options_.top_k);
}

epx_tensor NativeLayer::weights(const Buffer& buffer) const {
  return epx_tensor_2d(buffer.data(), EPX_FLOAT32, options_.tokens, options_.top_k);
}

epx_tensor NativeLayer::pre_act() const {
  return epx_tensor_2d(pre_act_.data(), options_.dtype, native_.num_rows(), int64_t{2} * options_.block.ffn);
}

} // namespace epx::bench
