// The MoE layer on epx: one block per layer, all of them on one group.
#include <exception>

#include "epx/epx_mpi.h"
#include "examples/train_moe/moe_layer.h"
#include "examples/train_moe/pieces.h"

namespace train {
namespace {

float* unconst(const float* data) { // epx_tensor does not know const
  return const_cast<float*>(data);
}

class EpxLayer final : public MoeLayer {
public:
  EpxLayer(const Group& group, const World& world, const ModelOptions& model, double aux_loss, Parameters& parameters,
           Experts experts)
      : MoeLayer(model, aux_loss), group_(group.get()), num_ranks_(world.size()), parameters_(parameters),
        experts_(experts) {
    epx_moe_block_config config;
    check(epx_moe_block_config_init(&config), "epx_moe_block_config_init");
    config.router.num_experts = model.experts;
    config.router.top_k = model.top_k;
    config.router.aux_loss_coeff = aux_loss;
    config.ffn.hidden_dim = model.hidden;
    config.ffn.ffn_dim = model.ffn;
    check(epx_moe_block_create(group_, &config, &block_), "epx_moe_block_create");
    global_counts_.resize(static_cast<size_t>(num_ranks_) * model.experts);
  }
  ~EpxLayer() override {
    if (std::uncaught_exceptions() > 0) epx_group_abort(group_); // the other ranks may never come to destroy theirs
    epx_moe_block_destroy(block_);
  }

  void forward(const float* tokens, const float* logits, const Chunks& chunks, float* out) override {
    num_tokens_ = chunks.num_tokens();
    topk_idx_.resize(num_tokens_ * model_.top_k);
    const epx_tensor token_rows = rows(unconst(tokens), model_.hidden);
    const epx_tensor logit_rows = rows(unconst(logits), model_.experts);
    const epx_tensor out_rows = rows(out, model_.hidden);
    const epx_tensor topk_idx = epx_tensor_2d(topk_idx_.data(), EPX_INT32, num_tokens_, model_.top_k);
    const epx_tensor global_counts = epx_tensor_2d(global_counts_.data(), EPX_INT32, num_ranks_, model_.experts);
    const epx_tensor info = epx_tensor_1d(info_, EPX_INT64, 3);
    const ExpertTensors weights(model_, num_local_experts(), parameters_.values(experts_.gate_up),
                                parameters_.values(experts_.down));

    epx_moe_block_fwd_args args{};
    args.struct_size = sizeof(args);
    args.tokens = &token_rows;
    args.logits = &logit_rows;
    args.params = weights.get();
    args.out = &out_rows;
    args.topk_idx = &topk_idx;
    args.global_counts = &global_counts;
    args.info = &info;
    check(epx_moe_block_fwd(block_, &args), "epx_moe_block_fwd");
  }

  void backward(const float* grad_out, float* grad_tokens, float* grad_logits, ChunkGrads&) override {
    const epx_tensor grad_out_rows = rows(unconst(grad_out), model_.hidden);
    const epx_tensor grad_token_rows = rows(grad_tokens, model_.hidden);
    const epx_tensor grad_logit_rows = rows(grad_logits, model_.experts);
    const ExpertTensors weights(model_, num_local_experts(), parameters_.values(experts_.gate_up),
                                parameters_.values(experts_.down));
    const ExpertTensors grads(model_, num_local_experts(), parameters_.sharded_grads(experts_.gate_up),
                              parameters_.sharded_grads(experts_.down));

    epx_moe_block_bwd_args args{};
    args.struct_size = sizeof(args);
    args.params = weights.get();
    args.grad_out = &grad_out_rows;
    args.aux_loss_grad = 1;
    args.grad_tokens = &grad_token_rows;
    args.grad_logits = &grad_logit_rows;
    args.grads = grads.get();
    check(epx_moe_block_bwd(block_, &args), "epx_moe_block_bwd");
  }

private:
  int64_t num_local_experts() const { return parameters_.tensor(experts_.gate_up).count; }
  epx_tensor rows(float* data, int64_t width) const { return epx_tensor_2d(data, EPX_FLOAT32, num_tokens_, width); }

  epx_group group_;
  int num_ranks_;
  Parameters& parameters_;
  Experts experts_;
  int64_t num_tokens_ = 0;
  epx_moe_block block_ = nullptr;
};

} // namespace

Group::Group(const World& world, const ModelOptions& model, int64_t max_tokens, int64_t timeout_ms) {
  epx_group_config config;
  check(epx_group_config_init(&config), "epx_group_config_init");
  config.num_experts = model.experts;
  config.max_tokens_per_rank = static_cast<int32_t>(max_tokens);
  config.hidden_dim = model.hidden;
  config.max_top_k = model.top_k;
  config.max_alignment = 1;
  config.max_token_dtype = EPX_FLOAT32;
  config.transport = EPX_TRANSPORT_HOST;        // the experts compute on the host
  config.combine_precision = EPX_COMBINE_EXACT; // the same bits for every number of ranks
  config.timeout_ms = timeout_ms;
  epx_bootstrap bootstrap;
  check(epx_bootstrap_mpi(world.comm(), timeout_ms, &bootstrap), "epx_bootstrap_mpi");
  const epx_status status = epx_group_create(&bootstrap, &config, &group_);
  epx_bootstrap_free(&bootstrap);
  check(status, "epx_group_create");
}

void Group::require_no_events() const {
  epx_group_report report{};
  report.struct_size = sizeof(report);
  check(epx_group_status(group_, &report), "epx_group_status");
  if (report.message[0] != '\0') fail(kExitFailure, "epx: {}", report.message);
}

std::unique_ptr<MoeLayer> make_epx_layer(const Group& group, const World& world, const ModelOptions& model, double aux_loss,
                                         Parameters& parameters, Experts experts) {
  return std::make_unique<EpxLayer>(group, world, model, aux_loss, parameters, experts);
}

} // namespace train
