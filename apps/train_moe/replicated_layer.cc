// SPDX-License-Identifier: Apache-2.0
// Without exchange every rank has all experts and computes them on its own tokens, chunk by chunk, so that the experts'
// gradients can be summed over the ranks like those of any other replicated parameter.
#include "apps/train_moe/moe_layer.h"
#include "apps/train_moe/pieces.h"

namespace train {
namespace {

class ReplicatedLayer final : public MoeLayer {
public:
  ReplicatedLayer(const World& world, const ModelOptions& model, double aux_loss, Parameters& parameters, Experts experts)
      : MoeLayer(model, aux_loss), world_(world), parameters_(parameters), experts_(experts), router_(model, aux_loss),
        ffn_(model, model.experts) {}

  void forward(const float* tokens, const float* logits, const Chunks& chunks, float* out) override {
    chunks_ = chunks;
    logits_ = logits;
    topk_idx_.resize(chunks.num_tokens() * model_.top_k);
    topk_weights_.resize(topk_idx_.size());
    router_.forward(logits, chunks.num_tokens(), topk_idx_.data(), topk_weights_.data(), info_);

    passes_.clear();
    std::vector<int32_t> counts(model_.experts);
    for (int64_t c = 0; c < chunks.count(); ++c) {
      const int64_t first = chunks.begin(c);
      Pass& pass = passes_.emplace_back(
          Permutation(topk_idx_.data() + first * model_.top_k, chunks.size(c), model_.top_k, model_.experts));
      pass.rows = pass.by_expert.permute(tokens + first * model_.hidden, model_.hidden);
      pass.expert_out = ffn_.forward(pass.rows, pass.by_expert, values(), pass.pre_act);
      pass.by_expert.unpermute(pass.expert_out, topk_weights_.data() + first * model_.top_k, model_.hidden,
                               out + first * model_.hidden);
      for (int e = 0; e < model_.experts; ++e)
        counts[e] += pass.by_expert.counts()[e];
    }
    global_counts_ = world_.gather(std::span<const int32_t>(counts)); // for the load-balance loss
  }

  void backward(const float* grad_out, float* grad_tokens, float* grad_logits, ChunkGrads& chunk_grads) override {
    std::vector<float> grad_topk_weights(topk_weights_.size());
    for (int64_t c = 0; c < chunks_.count(); ++c) {
      const Pass& pass = passes_[c];
      const int64_t first = chunks_.begin(c);
      const std::vector<float> grad_expert_out = pass.by_expert.unpermute_bwd(
          grad_out + first * model_.hidden, pass.expert_out, topk_weights_.data() + first * model_.top_k, model_.hidden,
          grad_topk_weights.data() + first * model_.top_k);
      const auto grads =
          expert_grads(model_, model_.experts, chunk_grads.of(c, experts_.gate_up), chunk_grads.of(c, experts_.down));
      const std::vector<float> grad_rows =
          ffn_.backward(pass.rows, pass.by_expert, values(), pass.pre_act, grad_expert_out, grads);
      pass.by_expert.permute_bwd(grad_rows, model_.hidden, grad_tokens + first * model_.hidden);
    }
    router_.backward(logits_, chunks_.num_tokens(), topk_idx_.data(), grad_topk_weights.data(), global_counts_,
                     grad_logits);
  }

private:
  // A Pass is what a chunk's forward keeps for its backward.
  struct Pass {
    explicit Pass(Permutation permutation) : by_expert(std::move(permutation)) {}

    Permutation by_expert;
    std::vector<float> rows, pre_act, expert_out;
  };

  epx::moe::FfnParams values() {
    return expert_params(model_, model_.experts, parameters_.values(experts_.gate_up), parameters_.values(experts_.down));
  }

  const World& world_;
  Parameters& parameters_;
  Experts experts_;
  Router router_;
  GroupedFfn ffn_;
  Chunks chunks_{0, 0, 1};
  const float* logits_ = nullptr;
  std::vector<float> topk_weights_; // [T, K]
  std::vector<Pass> passes_;        // by chunk
};

} // namespace

std::unique_ptr<MoeLayer> make_replicated_layer(const World& world, const ModelOptions& model, double aux_loss,
                                                Parameters& parameters, Experts experts) {
  return std::make_unique<ReplicatedLayer>(world, model, aux_loss, parameters, experts);
}

} // namespace train
