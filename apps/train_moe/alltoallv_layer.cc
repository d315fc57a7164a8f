// SPDX-License-Identifier: Apache-2.0
// This is the native baseline, without epx. Routes are sorted by expert at their source, counts are exchanged, then
// MPI_Alltoallv moves one row per route, and the receiver sorts them by its own experts; the way back is the same.
#include <optional>

#include "apps/train_moe/moe_layer.h"
#include "apps/train_moe/pieces.h"

namespace train {
namespace {

class AlltoallvLayer final : public MoeLayer {
public:
  AlltoallvLayer(const World& world, const ModelOptions& model, double aux_loss, Parameters& parameters, Experts experts)
      : MoeLayer(model, aux_loss), world_(world), parameters_(parameters), experts_(experts), router_(model, aux_loss),
        mine_(ownership(model.experts, {world.rank(), world.size()})), ffn_(model, mine_.count) {}

  void forward(const float* tokens, const float* logits, const Chunks& chunks, float* out) override {
    num_tokens_ = chunks.num_tokens();
    logits_ = logits;
    topk_idx_.resize(num_tokens_ * model_.top_k);
    topk_weights_.resize(topk_idx_.size());
    router_.forward(logits, num_tokens_, topk_idx_.data(), topk_weights_.data(), info_);

    by_expert_.emplace(topk_idx_.data(), num_tokens_, model_.top_k, model_.experts);
    global_counts_ = world_.gather(std::span<const int32_t>(by_expert_->counts()));
    plan();
    const std::vector<float> arrived = send_to_experts(by_expert_->permute(tokens, model_.hidden));
    recv_tokens_ = by_local_expert_->permute(arrived.data(), model_.hidden);
    const std::vector<float> expert_out = ffn_.forward(recv_tokens_, *by_local_expert_, values(), pre_act_);
    std::vector<float> leaving(arrived.size());
    by_local_expert_->unpermute(expert_out, nullptr, model_.hidden, leaving.data());
    returned_ = send_home(leaving);
    by_expert_->unpermute(returned_, topk_weights_.data(), model_.hidden, out);
  }

  void backward(const float* grad_out, float* grad_tokens, float* grad_logits, ChunkGrads&) override {
    std::vector<float> grad_topk_weights(topk_weights_.size());
    const std::vector<float> arrived = send_to_experts(
        by_expert_->unpermute_bwd(grad_out, returned_, topk_weights_.data(), model_.hidden, grad_topk_weights.data()));
    const std::vector<float> grad_expert_out = by_local_expert_->permute(arrived.data(), model_.hidden);
    const auto grads = expert_grads(model_, mine_.count, parameters_.sharded_grads(experts_.gate_up),
                                    parameters_.sharded_grads(experts_.down));
    const std::vector<float> grad_recv =
        ffn_.backward(recv_tokens_, *by_local_expert_, values(), pre_act_, grad_expert_out, grads);
    std::vector<float> leaving(arrived.size());
    by_local_expert_->permute_bwd(grad_recv, model_.hidden, leaving.data());
    by_expert_->permute_bwd(send_home(leaving), model_.hidden, grad_tokens);
    router_.backward(logits_, num_tokens_, topk_idx_.data(), grad_topk_weights.data(), global_counts_, grad_logits);
  }

private:
  // MPI takes the elements per rank, and where each rank's begin.
  struct Parcel {
    std::vector<int> sizes, begins;
    int64_t total = 0;

    explicit Parcel(const std::vector<int64_t>& elements) {
      for (const int64_t size : elements) {
        begins.push_back(as_count(total));
        sizes.push_back(as_count(size));
        total += size;
      }
    }
  };

  epx::moe::FfnParams values() {
    return expert_params(model_, mine_.count, parameters_.values(experts_.gate_up), parameters_.values(experts_.down));
  }

  int32_t count(int from, int64_t expert) const { return global_counts_[from * model_.experts + expert]; }

  // Computes from the counts what goes to which rank, and each arriving row's local expert. Rows arrive by (source, expert).
  void plan() {
    std::vector<int64_t> to(world_.size()), from(world_.size()); // elements
    std::vector<int32_t> local_expert;
    for (int rank = 0; rank < world_.size(); ++rank) {
      const Ownership theirs = ownership(model_.experts, {rank, world_.size()});
      for (int64_t e = 0; e < theirs.count; ++e)
        to[rank] += int64_t{count(world_.rank(), theirs.first + e)} * model_.hidden;
      for (int64_t e = 0; e < mine_.count; ++e) {
        const int32_t rows = count(rank, mine_.first + e);
        from[rank] += int64_t{rows} * model_.hidden;
        local_expert.insert(local_expert.end(), rows, static_cast<int32_t>(e));
      }
    }
    outward_.emplace(to);
    inward_.emplace(from);
    by_local_expert_.emplace(local_expert.data(), static_cast<int64_t>(local_expert.size()), 1, mine_.count);
  }

  std::vector<float> send_to_experts(const std::vector<float>& rows) const { return exchange(rows, *outward_, *inward_); }
  std::vector<float> send_home(const std::vector<float>& rows) const { return exchange(rows, *inward_, *outward_); }

  std::vector<float> exchange(const std::vector<float>& rows, const Parcel& send, const Parcel& receive) const {
    std::vector<float> arrived(receive.total);
    MPI_Alltoallv(rows.data(), send.sizes.data(), send.begins.data(), MPI_FLOAT, arrived.data(), receive.sizes.data(),
                  receive.begins.data(), MPI_FLOAT, world_.comm());
    return arrived;
  }

  const World& world_;
  Parameters& parameters_;
  Experts experts_;
  Router router_;
  Ownership mine_;
  GroupedFfn ffn_;

  // These are of the last forward.
  int64_t num_tokens_ = 0;
  const float* logits_ = nullptr;
  std::vector<float> topk_weights_;            // [T, K]
  std::optional<Permutation> by_expert_;       // routes of this rank
  std::optional<Permutation> by_local_expert_; // rows of this rank's experts
  std::optional<Parcel> outward_, inward_;
  std::vector<float> recv_tokens_, pre_act_; // rows of this rank's experts
  std::vector<float> returned_;              // experts' outputs for the routes of this rank
};

} // namespace

std::unique_ptr<MoeLayer> make_alltoallv_layer(const World& world, const ModelOptions& model, double aux_loss,
                                               Parameters& parameters, Experts experts) {
  return std::make_unique<AlltoallvLayer>(world, model, aux_loss, parameters, experts);
}

} // namespace train
