// SPDX-License-Identifier: Apache-2.0
// The dense baseline: all ranks' tokens come to every rank, whose experts compute all of them. A token's gates are the router's
// weights for the experts that were selected, and 0 for the others. Its partial sums go home and are added in rank order.
#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "apps/train_moe/moe_layer.h"
#include "apps/train_moe/pieces.h"

namespace train {
namespace {

class DenseLayer final : public MoeLayer {
public:
  DenseLayer(const World& world, const ModelOptions& model, double aux_loss, Parameters& parameters, Experts experts)
      : MoeLayer(model, aux_loss), world_(world), parameters_(parameters), experts_(experts), router_(model, aux_loss),
        mine_(experts_of(world.rank())), ffn_(model, mine_.count) {}

  void forward(const float* tokens, const float* logits, const Chunks& chunks, float* out) override {
    num_tokens_ = chunks.num_tokens();
    logits_ = logits;
    topk_idx_.resize(num_tokens_ * model_.top_k);
    topk_weights_.resize(topk_idx_.size());
    router_.forward(logits, num_tokens_, topk_idx_.data(), topk_weights_.data(), info_);

    tokens_of_ = world_.gather(std::span<const int64_t>(&num_tokens_, 1));
    const std::vector<float> all = world_.gather(rows(tokens));
    num_all_ = std::ssize(all) / model_.hidden;
    gather_gates();
    zones_.reset();
    std::vector<float> sums(all.size());
    if (mine_.count > 0) {
      std::vector<int32_t> expert_of_row;
      recv_tokens_.clear();
      for (int32_t e = 0; e < mine_.count; ++e) {
        expert_of_row.insert(expert_of_row.end(), num_all_, e);
        recv_tokens_.insert(recv_tokens_.end(), all.begin(), all.end());
      }
      zones_.emplace(expert_of_row.data(), std::ssize(expert_of_row), 1, mine_.count);
      expert_out_ = ffn_.forward(recv_tokens_, *zones_, values(), pre_act_);
      for_each_element(
          [&](int64_t gate, int64_t row, int64_t of_token) { sums[of_token] += gates_[gate] * expert_out_[row]; });
    }
    add_at_home(sums, out);
  }

  void backward(const float* grad_out, float* grad_tokens, float* grad_logits, ChunkGrads&) override {
    const std::vector<float> all = world_.gather(rows(grad_out));
    std::vector<float> sums(all.size()), grad_gates(gates_.size());
    const auto grads = expert_grads(model_, mine_.count, parameters_.sharded_grads(experts_.gate_up),
                                    parameters_.sharded_grads(experts_.down));
    if (mine_.count > 0) {
      std::vector<float> grad_expert_out(expert_out_.size());
      for_each_element([&](int64_t gate, int64_t row, int64_t of_token) {
        grad_expert_out[row] = gates_[gate] * all[of_token];
        grad_gates[gate] += expert_out_[row] * all[of_token];
      });
      const std::vector<float> grad_recv = ffn_.backward(recv_tokens_, *zones_, values(), pre_act_, grad_expert_out, grads);
      for_each_element([&](int64_t, int64_t row, int64_t of_token) { sums[of_token] += grad_recv[row]; });
    }
    add_at_home(sums, grad_tokens);
    const std::vector<float> grad_topk_weights = take_home(grad_gates);
    router_.backward(logits_, num_tokens_, topk_idx_.data(), grad_topk_weights.data(), global_counts_, grad_logits);
  }

private:
  Ownership experts_of(int rank) const { return ownership(model_.experts, {rank, world_.size()}); }

  std::span<const float> rows(const float* of_tokens) const {
    return {of_tokens, static_cast<size_t>(num_tokens_ * model_.hidden)};
  }

  epx::moe::FfnParams values() {
    return expert_params(model_, mine_.count, parameters_.values(experts_.gate_up), parameters_.values(experts_.down));
  }

  // Writes gates_ and global_counts_.
  void gather_gates() {
    const std::vector<int32_t> idx = world_.gather(std::span<const int32_t>(topk_idx_));
    const std::vector<float> weights = world_.gather(std::span<const float>(topk_weights_));
    gates_.assign(mine_.count * num_all_, 0);
    for (size_t i = 0; i < idx.size(); ++i)
      if (const int64_t e = idx[i] - mine_.first; e >= 0 && e < mine_.count)
        gates_[e * num_all_ + static_cast<int64_t>(i) / model_.top_k] = weights[i];
    std::vector<int32_t> counts(model_.experts);
    for (const int32_t expert : topk_idx_)
      if (expert >= 0) ++counts[expert]; // else its token's logits are not numbers
    global_counts_ = world_.gather(std::span<const int32_t>(counts));
  }

  // Calls action(index of a gate, of an element of its expert's row, and of that of its token), expert by expert.
  template <typename Action>
  void for_each_element(Action&& action) const {
    for (int64_t gate = 0; gate < mine_.count * num_all_; ++gate)
      for (int64_t i = 0; i < model_.hidden; ++i)
        action(gate, gate * model_.hidden + i, gate % num_all_ * model_.hidden + i);
  }

  // Sends every token's `parts` [tokens of all ranks, width of this rank] home. Returns [tokens, width of r], for each rank r.
  template <typename WidthOf>
  std::vector<float> send_home(const std::vector<float>& parts, WidthOf&& width_of) const {
    std::vector<int> send, send_begins, receive, receive_begins;
    int64_t sent = 0, received = 0;
    for (int rank = 0; rank < world_.size(); ++rank) {
      send_begins.push_back(as_count(sent));
      receive_begins.push_back(as_count(received));
      send.push_back(as_count(tokens_of_[rank] * width_of(world_.rank())));
      receive.push_back(as_count(num_tokens_ * width_of(rank)));
      sent += send.back();
      received += receive.back();
    }
    std::vector<float> arrived(received);
    MPI_Alltoallv(parts.data(), send.data(), send_begins.data(), MPI_FLOAT, arrived.data(), receive.data(),
                  receive_begins.data(), MPI_FLOAT, world_.comm());
    return arrived;
  }

  // out[T, H] = the sums of all ranks for this rank's tokens
  void add_at_home(const std::vector<float>& sums, float* out) const {
    const std::vector<float> arrived = send_home(sums, [&](int) { return int64_t{model_.hidden}; });
    const int64_t size = num_tokens_ * model_.hidden;
    std::fill_n(out, size, 0.0f);
    for (int64_t i = 0; i < std::ssize(arrived); ++i)
      out[i % size] += arrived[i];
  }

  // Returns of the gradients of gates those of this rank's routes, [T, K].
  std::vector<float> take_home(const std::vector<float>& grad_gates) const {
    std::vector<float> by_token(grad_gates.size()); // [tokens of all ranks, experts]
    for (int64_t gate = 0; gate < std::ssize(grad_gates); ++gate)
      by_token[gate % num_all_ * mine_.count + gate / num_all_] = grad_gates[gate];
    const std::vector<float> arrived = send_home(by_token, [&](int rank) { return experts_of(rank).count; });
    std::vector<float> of_routes(topk_idx_.size());
    for (int rank = 0; rank < world_.size(); ++rank) {
      const Ownership theirs = experts_of(rank);
      const float* const from = arrived.data() + num_tokens_ * theirs.first;
      for (size_t i = 0; i < of_routes.size(); ++i)
        if (const int64_t e = topk_idx_[i] - theirs.first; e >= 0 && e < theirs.count)
          of_routes[i] = from[static_cast<int64_t>(i) / model_.top_k * theirs.count + e];
    }
    return of_routes;
  }

  const World& world_;
  Parameters& parameters_;
  Experts experts_;
  Router router_;
  Ownership mine_;
  GroupedFfn ffn_;

  // These are of the last forward.
  int64_t num_tokens_ = 0, num_all_ = 0; // of this rank, and of all
  std::vector<int64_t> tokens_of_;       // by rank
  const float* logits_ = nullptr;
  std::vector<float> topk_weights_;                       // [T, K]
  std::vector<float> gates_;                              // [E_l, tokens of all ranks]
  std::optional<Permutation> zones_;                      // all tokens for each expert
  std::vector<float> recv_tokens_, pre_act_, expert_out_; // by gate
};

} // namespace

std::unique_ptr<MoeLayer> make_dense_layer(const World& world, const ModelOptions& model, double aux_loss,
                                           Parameters& parameters, Experts experts) {
  return std::make_unique<DenseLayer>(world, model, aux_loss, parameters, experts);
}

} // namespace train
