// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/pieces.h"

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

} // namespace

Router::Router(const ModelOptions& model, double aux_loss) {
  config_.num_experts = model.experts;
  config_.top_k = model.top_k;
  config_.aux_loss_coeff = aux_loss;
}

void Router::forward(const float* logits, int64_t num_tokens, int32_t* topk_idx, float* topk_weights, int64_t* info) const {
  epx::moe::router(config_, {.logits = floats(logits, num_tokens, config_.num_experts),
                             .topk_idx = integers(topk_idx, num_tokens, config_.top_k),
                             .topk_weights = floats(topk_weights, num_tokens, config_.top_k),
                             .info = {info, EPX_INT64, 3}});
}

void Router::backward(const float* logits, int64_t num_tokens, const int32_t* topk_idx, const float* grad_topk_weights,
                      const std::vector<int32_t>& global_counts, float* grad_logits) const {
  epx::moe::RouterBwdArgs args = {.logits = floats(logits, num_tokens, config_.num_experts),
                                  .topk_idx = integers(topk_idx, num_tokens, config_.top_k),
                                  .grad_topk_weights = floats(grad_topk_weights, num_tokens, config_.top_k),
                                  .aux_loss_grad = 1,
                                  .grad_logits = floats(grad_logits, num_tokens, config_.num_experts)};
  const auto num_ranks = static_cast<int64_t>(global_counts.size()) / config_.num_experts;
  if (config_.aux_loss_coeff != 0) args.global_counts = integers(global_counts.data(), num_ranks, config_.num_experts);
  epx::moe::router_bwd(config_, args);
}

Permutation::Permutation(const int32_t* topk_idx, int64_t num_tokens, int64_t top_k, int64_t num_experts)
    : num_tokens_(num_tokens), top_k_(top_k), counts_(num_experts), offsets_(num_experts + 1),
      row_map_(num_tokens * top_k) {
  epx::moe::row_map({.topk_idx = integers(topk_idx, num_tokens, top_k),
                     .counts = counts_,
                     .offsets = offsets_,
                     .row_map = {row_map_, {num_tokens, top_k}}});
}

epx::ConstTensor Permutation::map() const {
  return integers(row_map_.data(), num_tokens_, top_k_);
}

std::vector<float> Permutation::permute(const float* tokens, int64_t hidden) const {
  std::vector<float> rows(num_rows() * hidden);
  epx::moe::permute(
      {.row_map = map(), .tokens = floats(tokens, num_tokens_, hidden), .rows = floats(rows.data(), num_rows(), hidden)});
  return rows;
}

void Permutation::permute_bwd(const std::vector<float>& grad_rows, int64_t hidden, float* grad_tokens) const {
  epx::moe::permute_bwd({.row_map = map(),
                         .grad_rows = floats(grad_rows.data(), num_rows(), hidden),
                         .grad_tokens = floats(grad_tokens, num_tokens_, hidden)});
}

void Permutation::unpermute(const std::vector<float>& rows, const float* topk_weights, int64_t hidden,
                            float* tokens) const {
  epx::moe::UnpermuteArgs args = {
      .row_map = map(), .rows = floats(rows.data(), num_rows(), hidden), .tokens = floats(tokens, num_tokens_, hidden)};
  if (topk_weights != nullptr) args.topk_weights = floats(topk_weights, num_tokens_, top_k_);
  epx::moe::unpermute(args);
}

std::vector<float> Permutation::unpermute_bwd(const float* grad_tokens, const std::vector<float>& rows,
                                              const float* topk_weights, int64_t hidden, float* grad_topk_weights) const {
  std::vector<float> grad_rows(num_rows() * hidden);
  epx::moe::unpermute_bwd({.row_map = map(),
                           .grad_tokens = floats(grad_tokens, num_tokens_, hidden),
                           .rows = floats(rows.data(), num_rows(), hidden),
                           .topk_weights = floats(topk_weights, num_tokens_, top_k_),
                           .grad_rows = floats(grad_rows.data(), num_rows(), hidden),
                           .grad_topk_weights = floats(grad_topk_weights, num_tokens_, top_k_)});
  return grad_rows;
}

epx::moe::FfnParams expert_params(const ModelOptions& model, int64_t num_local_experts, const void* gate_up,
                                  const void* down, epx_dtype dtype) {
  return {.gate_up_weight = {gate_up, dtype, {num_local_experts, 2 * model.ffn, model.hidden}},
          .down_weight = {down, dtype, {num_local_experts, model.hidden, model.ffn}}};
}

epx::moe::FfnGrads expert_grads(const ModelOptions& model, int64_t num_local_experts, float* gate_up, float* down) {
  return {.gate_up_weight = {gate_up, EPX_FLOAT32, {num_local_experts, 2 * model.ffn, model.hidden}},
          .down_weight = {down, EPX_FLOAT32, {num_local_experts, model.hidden, model.ffn}}};
}

GroupedFfn::GroupedFfn(const ModelOptions& model, int64_t num_local_experts) {
  config_.num_local_experts = static_cast<int32_t>(num_local_experts);
  config_.hidden_dim = model.hidden;
  config_.ffn_dim = model.ffn;
}

std::vector<float> GroupedFfn::forward(const std::vector<float>& rows, const Permutation& zones,
                                       const epx::moe::FfnParams& params, std::vector<float>& pre_act) const {
  const int64_t num_rows = zones.num_rows();
  std::vector<float> out(rows.size());
  pre_act.resize(num_rows * 2 * config_.ffn_dim);
  epx::moe::ffn(config_, {.params = params,
                          .recv_tokens = floats(rows.data(), num_rows, config_.hidden_dim),
                          .counts = zones.counts(),
                          .offsets = zones.offsets(),
                          .expert_out = floats(out.data(), num_rows, config_.hidden_dim),
                          .pre_act = floats(pre_act.data(), num_rows, 2 * config_.ffn_dim)});
  return out;
}

std::vector<float> GroupedFfn::backward(const std::vector<float>& rows, const Permutation& zones,
                                        const epx::moe::FfnParams& params, const std::vector<float>& pre_act,
                                        const std::vector<float>& grad_out, const epx::moe::FfnGrads& grads) const {
  const int64_t num_rows = zones.num_rows();
  std::vector<float> grad_rows(rows.size());
  epx::moe::ffn_bwd(config_, {.params = params,
                              .recv_tokens = floats(rows.data(), num_rows, config_.hidden_dim),
                              .counts = zones.counts(),
                              .offsets = zones.offsets(),
                              .pre_act = floats(pre_act.data(), num_rows, 2 * config_.ffn_dim),
                              .grad_expert_out = floats(grad_out.data(), num_rows, config_.hidden_dim),
                              .grad_recv = floats(grad_rows.data(), num_rows, config_.hidden_dim),
                              .grads = grads});
  return grad_rows;
}

} // namespace train
