// SPDX-License-Identifier: Apache-2.0
// The MoE layer on epx has one block per layer, all of them on one group.
#include <exception>

#include "epx/epx_moe.h"
#include "epx/epx_mpi.hpp"
#include "examples/train_moe/moe_layer.h"
#include "examples/train_moe/pieces.h"

namespace train {
namespace {

class EpxLayer final : public MoeLayer {
public:
  EpxLayer(epx::GroupView group, const World& world, const ModelOptions& model, double aux_loss, Parameters& parameters,
           Experts experts)
      : MoeLayer(model, aux_loss), group_(group), num_ranks_(world.size()), parameters_(parameters), experts_(experts) {
    epx_moe_router_config router;
    epx::require_success(epx_moe_router_config_init(&router, sizeof(router)), "epx_moe_router_config_init");
    router.num_experts = model.experts;
    router.top_k = model.top_k;
    router.aux_loss_coeff = aux_loss;
    epx_moe_ffn_config ffn;
    epx::require_success(epx_moe_ffn_config_init(&ffn, sizeof(ffn)), "epx_moe_ffn_config_init");
    ffn.hidden_dim = model.hidden;
    ffn.ffn_dim = model.ffn;
    epx_moe_block_config config;
    epx::require_success(epx_moe_block_config_init(&config, sizeof(config)), "epx_moe_block_config_init");
    config.router = &router;
    config.ffn = &ffn;
    epx::require_success(epx_moe_block_create(group_.get(), &config, &block_), "epx_moe_block_create");
    global_counts_.resize(static_cast<size_t>(num_ranks_) * model.experts);
  }
  ~EpxLayer() override {
    if (std::uncaught_exceptions() > 0) group_.abort(); // the other ranks may never call epx_moe_block_destroy
    epx_moe_block_destroy(block_);
  }

  void forward(const float* tokens, const float* logits, const Chunks& chunks, float* out) override {
    num_tokens_ = chunks.num_tokens();
    topk_idx_.resize(num_tokens_ * model_.top_k);
    const auto token_rows = rows(tokens, model_.hidden);
    const auto logit_rows = rows(logits, model_.experts);
    const auto out_rows = rows(out, model_.hidden);
    const epx::Tensor topk_idx(topk_idx_, {num_tokens_, model_.top_k});
    const epx::Tensor global_counts(global_counts_, {num_ranks_, model_.experts});
    const epx::Tensor info = info_;
    const ExpertTensors weights(model_, num_local_experts(), parameters_.values(experts_.gate_up),
                                parameters_.values(experts_.down));

    epx_moe_block_fwd_args args{};
    args.struct_size = sizeof(args);
    args.tokens = token_rows.get();
    args.logits = logit_rows.get();
    args.params = weights.get();
    args.out = out_rows.get();
    args.topk_idx = topk_idx.get();
    args.global_counts = global_counts.get();
    args.info = info.get();
    epx::require_success(epx_moe_block_fwd(block_, &args), "epx_moe_block_fwd");
  }

  void backward(const float* grad_out, float* grad_tokens, float* grad_logits, ChunkGrads&) override {
    const auto grad_out_rows = rows(grad_out, model_.hidden);
    const auto grad_token_rows = rows(grad_tokens, model_.hidden);
    const auto grad_logit_rows = rows(grad_logits, model_.experts);
    const ExpertTensors weights(model_, num_local_experts(), parameters_.values(experts_.gate_up),
                                parameters_.values(experts_.down));
    const ExpertTensors grads(model_, num_local_experts(), parameters_.sharded_grads(experts_.gate_up),
                              parameters_.sharded_grads(experts_.down));

    epx_moe_block_bwd_args args{};
    args.struct_size = sizeof(args);
    args.params = weights.get();
    args.grad_out = grad_out_rows.get();
    args.aux_loss_grad = 1;
    args.grad_tokens = grad_token_rows.get();
    args.grad_logits = grad_logit_rows.get();
    args.grads = grads.get();
    epx::require_success(epx_moe_block_bwd(block_, &args), "epx_moe_block_bwd");
  }

private:
  int64_t num_local_experts() const { return parameters_.tensor(experts_.gate_up).count; }
  epx::Tensor rows(float* data, int64_t width) const { return {data, EPX_FLOAT32, {num_tokens_, width}}; }
  epx::ConstTensor rows(const float* data, int64_t width) const { return {data, EPX_FLOAT32, {num_tokens_, width}}; }

  epx::GroupView group_;
  int num_ranks_;
  Parameters& parameters_;
  Experts experts_;
  int64_t num_tokens_ = 0;
  epx_moe_block block_ = nullptr;
};

} // namespace

epx::Group make_group(const World& world, const ModelOptions& model, int64_t max_tokens, int64_t timeout_ms) {
  epx::GroupConfig config;
  config.num_experts = model.experts;
  config.max_tokens_per_rank = static_cast<int32_t>(max_tokens);
  config.hidden_dim = model.hidden;
  config.max_top_k = model.top_k;
  config.max_alignment = 1;
  config.max_token_dtype = EPX_FLOAT32;
  config.transport = EPX_TRANSPORT_HOST;        // the experts compute on the host
  config.combine_precision = EPX_COMBINE_EXACT; // the same bits for every number of ranks
  config.timeout_ms = timeout_ms;
  return {epx::bootstrap_mpi(world.comm(), std::chrono::milliseconds(timeout_ms)), config};
}

void require_no_events(epx::GroupView group) {
  const epx_group_report report = group.status();
  if (report.message[0] != '\0') fail(kExitFailure, "epx: {}", report.message);
}

std::unique_ptr<MoeLayer> make_epx_layer(epx::GroupView group, const World& world, const ModelOptions& model,
                                         double aux_loss, Parameters& parameters, Experts experts) {
  return std::make_unique<EpxLayer>(group, world, model, aux_loss, parameters, experts);
}

} // namespace train
