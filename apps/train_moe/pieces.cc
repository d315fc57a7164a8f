// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/pieces.h"

#include "apps/train_moe/errors.h"

namespace train {
namespace {

epx::Tensor floats(float* data, int64_t rows, int64_t width) {
  return {data, EPX_FLOAT32, {rows, width}};
}
epx::ConstTensor floats(const float* data, int64_t rows, int64_t width) {
  return {data, EPX_FLOAT32, {rows, width}};
}
epx::Tensor integers(int32_t* data, int64_t rows, int64_t width) {
  return {data, EPX_INT32, {rows, width}};
}
epx::ConstTensor integers(const int32_t* data, int64_t rows, int64_t width) {
  return {data, EPX_INT32, {rows, width}};
}

template <typename Args>
Args make_args() {
  Args args{};
  args.struct_size = sizeof(args);
  return args;
}

} // namespace

Router::Router(const ModelOptions& model, double aux_loss) {
  epx::require_success(epx_moe_router_config_init(&config_, sizeof(config_)), "epx_moe_router_config_init");
  config_.num_experts = model.experts;
  config_.top_k = model.top_k;
  config_.aux_loss_coeff = aux_loss;
}

void Router::forward(const float* logits, int64_t num_tokens, int32_t* topk_idx, float* topk_weights, int64_t* info) const {
  const auto logit_rows = floats(logits, num_tokens, config_.num_experts);
  const auto indices = integers(topk_idx, num_tokens, config_.top_k);
  const auto weights = floats(topk_weights, num_tokens, config_.top_k);
  const epx::Tensor counters(info, EPX_INT64, 3);
  auto args = make_args<epx_moe_router_args>();
  args.logits = logit_rows.get();
  args.topk_idx = indices.get();
  args.topk_weights = weights.get();
  args.info = counters.get();
  epx::require_success(epx_moe_router(&config_, &args), "epx_moe_router");
}

void Router::backward(const float* logits, int64_t num_tokens, const int32_t* topk_idx, const float* grad_topk_weights,
                      const std::vector<int32_t>& global_counts, float* grad_logits) const {
  const auto logit_rows = floats(logits, num_tokens, config_.num_experts);
  const auto indices = integers(topk_idx, num_tokens, config_.top_k);
  const auto grad_weights = floats(grad_topk_weights, num_tokens, config_.top_k);
  const auto num_ranks = static_cast<int64_t>(global_counts.size()) / config_.num_experts;
  const auto counts = integers(global_counts.data(), num_ranks, config_.num_experts);
  const auto grad_rows = floats(grad_logits, num_tokens, config_.num_experts);
  auto args = make_args<epx_moe_router_bwd_args>();
  args.logits = logit_rows.get();
  args.topk_idx = indices.get();
  args.grad_topk_weights = grad_weights.get();
  args.global_counts = config_.aux_loss_coeff != 0 ? counts.get() : nullptr;
  args.aux_loss_grad = 1;
  args.grad_logits = grad_rows.get();
  epx::require_success(epx_moe_router_bwd(&config_, &args), "epx_moe_router_bwd");
}

Permutation::Permutation(const int32_t* topk_idx, int64_t num_tokens, int64_t top_k, int64_t num_experts)
    : num_tokens_(num_tokens), top_k_(top_k), counts_(num_experts), offsets_(num_experts + 1),
      row_map_(num_tokens * top_k) {
  const auto indices = integers(topk_idx, num_tokens, top_k);
  const epx::Tensor counts = counts_;
  const epx::Tensor offsets = offsets_;
  const epx::Tensor row_map(row_map_, {num_tokens, top_k});
  auto args = make_args<epx_moe_row_map_args>();
  args.topk_idx = indices.get();
  args.counts = counts.get();
  args.offsets = offsets.get();
  args.row_map = row_map.get();
  epx::require_success(epx_moe_row_map(&args), "epx_moe_row_map");
}

epx::ConstTensor Permutation::map() const {
  return integers(row_map_.data(), num_tokens_, top_k_);
}

std::vector<float> Permutation::permute(const float* tokens, int64_t hidden) const {
  std::vector<float> rows(num_rows() * hidden);
  const epx::ConstTensor row_map = map();
  const auto from = floats(tokens, num_tokens_, hidden);
  const auto to = floats(rows.data(), num_rows(), hidden);
  auto args = make_args<epx_moe_permute_args>();
  args.row_map = row_map.get();
  args.tokens = from.get();
  args.rows = to.get();
  epx::require_success(epx_moe_permute(&args), "epx_moe_permute");
  return rows;
}

void Permutation::permute_bwd(const std::vector<float>& grad_rows, int64_t hidden, float* grad_tokens) const {
  const epx::ConstTensor row_map = map();
  const auto from = floats(grad_rows.data(), num_rows(), hidden);
  const auto to = floats(grad_tokens, num_tokens_, hidden);
  auto args = make_args<epx_moe_permute_bwd_args>();
  args.row_map = row_map.get();
  args.grad_rows = from.get();
  args.grad_tokens = to.get();
  epx::require_success(epx_moe_permute_bwd(&args), "epx_moe_permute_bwd");
}

void Permutation::unpermute(const std::vector<float>& rows, const float* topk_weights, int64_t hidden,
                            float* tokens) const {
  const epx::ConstTensor row_map = map();
  const auto from = floats(rows.data(), num_rows(), hidden);
  const auto weights = floats(topk_weights, num_tokens_, top_k_);
  const auto to = floats(tokens, num_tokens_, hidden);
  auto args = make_args<epx_moe_unpermute_args>();
  args.row_map = row_map.get();
  args.rows = from.get();
  args.topk_weights = topk_weights != nullptr ? weights.get() : nullptr;
  args.tokens = to.get();
  epx::require_success(epx_moe_unpermute(&args), "epx_moe_unpermute");
}

std::vector<float> Permutation::unpermute_bwd(const float* grad_tokens, const std::vector<float>& rows,
                                              const float* topk_weights, int64_t hidden, float* grad_topk_weights) const {
  std::vector<float> grad_rows(num_rows() * hidden);
  const epx::ConstTensor row_map = map();
  const auto from = floats(grad_tokens, num_tokens_, hidden);
  const auto forward_rows = floats(rows.data(), num_rows(), hidden);
  const auto weights = floats(topk_weights, num_tokens_, top_k_);
  const auto to = floats(grad_rows.data(), num_rows(), hidden);
  const auto grad_weights = floats(grad_topk_weights, num_tokens_, top_k_);
  auto args = make_args<epx_moe_unpermute_bwd_args>();
  args.row_map = row_map.get();
  args.grad_tokens = from.get();
  args.rows = forward_rows.get();
  args.topk_weights = weights.get();
  args.grad_rows = to.get();
  args.grad_topk_weights = grad_weights.get();
  epx::require_success(epx_moe_unpermute_bwd(&args), "epx_moe_unpermute_bwd");
  return grad_rows;
}

ExpertTensors::ExpertTensors(const ModelOptions& model, int64_t num_local_experts, const void* gate_up, const void* down,
                             epx_dtype dtype)
    : gate_up_(gate_up, dtype, {num_local_experts, 2 * model.ffn, model.hidden}),
      down_(down, dtype, {num_local_experts, model.hidden, model.ffn}) {
  params_.struct_size = sizeof(params_);
  params_.gate_up_weight = gate_up_.get();
  params_.down_weight = down_.get();
}

GroupedFfn::GroupedFfn(const ModelOptions& model, int64_t num_local_experts) {
  epx::require_success(epx_moe_ffn_config_init(&config_, sizeof(config_)), "epx_moe_ffn_config_init");
  config_.num_local_experts = static_cast<int32_t>(num_local_experts);
  config_.hidden_dim = model.hidden;
  config_.ffn_dim = model.ffn;
}

std::vector<float> GroupedFfn::forward(const std::vector<float>& rows, const Permutation& zones,
                                       const ExpertTensors& weights, std::vector<float>& pre_act) const {
  const int64_t num_rows = zones.num_rows();
  std::vector<float> out(rows.size());
  pre_act.resize(num_rows * 2 * config_.ffn_dim);
  const epx::ConstTensor counts = zones.counts();
  const epx::ConstTensor offsets = zones.offsets();
  const auto recv_tokens = floats(rows.data(), num_rows, config_.hidden_dim);
  const auto expert_out = floats(out.data(), num_rows, config_.hidden_dim);
  const auto saved = floats(pre_act.data(), num_rows, 2 * config_.ffn_dim);
  auto args = make_args<epx_moe_ffn_args>();
  args.params = weights.get();
  args.recv_tokens = recv_tokens.get();
  args.counts = counts.get();
  args.offsets = offsets.get();
  args.expert_out = expert_out.get();
  args.pre_act = saved.get();
  epx::require_success(epx_moe_ffn(&config_, &args), "epx_moe_ffn");
  return out;
}

std::vector<float> GroupedFfn::backward(const std::vector<float>& rows, const Permutation& zones,
                                        const ExpertTensors& weights, const std::vector<float>& pre_act,
                                        const std::vector<float>& grad_out, const ExpertTensors& grads) const {
  const int64_t num_rows = zones.num_rows();
  std::vector<float> grad_rows(rows.size());
  const epx::ConstTensor counts = zones.counts();
  const epx::ConstTensor offsets = zones.offsets();
  const auto recv_tokens = floats(rows.data(), num_rows, config_.hidden_dim);
  const auto saved = floats(pre_act.data(), num_rows, 2 * config_.ffn_dim);
  const auto grad_expert_out = floats(grad_out.data(), num_rows, config_.hidden_dim);
  const auto grad_recv = floats(grad_rows.data(), num_rows, config_.hidden_dim);
  auto args = make_args<epx_moe_ffn_bwd_args>();
  args.params = weights.get();
  args.recv_tokens = recv_tokens.get();
  args.counts = counts.get();
  args.offsets = offsets.get();
  args.pre_act = saved.get();
  args.grad_expert_out = grad_expert_out.get();
  args.grad_recv = grad_recv.get();
  args.grads = grads.get();
  epx::require_success(epx_moe_ffn_bwd(&config_, &args), "epx_moe_ffn_bwd");
  return grad_rows;
}

} // namespace train
