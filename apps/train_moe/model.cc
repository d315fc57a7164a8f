// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/model.h"

#include <cmath>
#include <numeric>

namespace train {
namespace {

constexpr int64_t kBytes = 256; // values of a byte

double init_limit(int64_t fan_in) { // uniform with variance 1 / fan_in
  return std::sqrt(3.0 / static_cast<double>(fan_in));
}

} // namespace

Model::Model(Device& device, const ModelOptions& options, Parameters& parameters, const Mesh& mesh, bool replicate_experts)
    : device_(device), options_(options), parameters_(parameters),
      context_width_(static_cast<int64_t>(options.context) * options.embedding), contexts_(device), targets_(device),
      last_x_(device), last_normed_(device), grad_out_(device), losses_(device), embedded_(device), grad_embedded_(device),
      moe_out_(device), grad_x_(device), grad_normed_(device), grad_logits_(device) {
  const int64_t hidden = options.hidden;
  const int64_t ffn = options.ffn;
  const auto add_experts = [&](const std::string& name, int64_t rows, int64_t width, double limit) {
    const Ownership kept = rows_kept(mesh, options.experts, rows);
    return replicate_experts ? parameters.add_shared(name, {options.experts, rows, width}, limit)
                             : parameters.add_sharded(name, {options.experts, rows, width}, limit, kept.first * width,
                                                      kept.count * width);
  };
  embedding_ = parameters.add_shared("embedding", {kBytes, options.embedding}, std::sqrt(3.0));
  in_weight_ = parameters.add_shared("in_weight", {hidden, context_width_}, init_limit(context_width_));
  in_bias_ = parameters.add_shared("in_bias", {hidden}, 0, false);
  for (int l = 0; l < options.layers; ++l) {
    const std::string prefix = fmt::format("layer{}.", l);
    layers_.emplace_back(device,
                         parameters.add_shared(prefix + "router_weight", {options.experts, hidden}, init_limit(hidden)));
    experts_.push_back({add_experts(prefix + "gate_up_weight", 2 * ffn, hidden, init_limit(hidden)),
                        add_experts(prefix + "down_weight", hidden, ffn, init_limit(ffn))});
  }
  out_weight_ = parameters.add_shared("out_weight", {kBytes, hidden}, 0.1 * init_limit(hidden));
  out_bias_ = parameters.add_shared("out_bias", {kBytes}, 0, false);
}

void Model::embed(int64_t chunk) {
  device_.embed(parameters_.values(embedding_), contexts_.data() + chunks_.begin(chunk) * options_.context,
                chunks_.size(chunk) * options_.context, options_.embedding, embedded_.data());
}

std::vector<double> Model::forward(const Text& text, std::span<const int64_t> positions, const Chunks& chunks) {
  const int64_t tokens = chunks.num_tokens();
  const int64_t hidden = options_.hidden;
  chunks_ = chunks;
  std::vector<unsigned char> contexts, targets;
  for (const int64_t position : positions.subspan(chunks.first_token(), tokens)) {
    contexts.insert(contexts.end(), text.bytes.begin() + position - options_.context, text.bytes.begin() + position);
    targets.push_back(text.bytes[position]);
  }
  contexts_.assign(contexts);
  targets_.assign(targets);
  for (Layer& layer : layers_) {
    layer.x.resize(tokens * hidden);
    layer.normed.resize(tokens * hidden);
    layer.logits.resize(tokens * options_.experts);
  }
  last_x_.resize(tokens * hidden);
  last_normed_.resize(tokens * hidden);
  grad_out_.resize(tokens * kBytes);
  losses_.resize(tokens);
  embedded_.resize(kChunk * context_width_);
  moe_out_.resize(tokens * hidden);

  moe_[0]->fetch_experts();
  // x_l is the l-th layer's, and the last one what the layers make of it.
  const auto x = [&](size_t l) { return l < layers_.size() ? layers_[l].x.data() : last_x_.data(); };
  for (int64_t c = 0; c < chunks.count(); ++c) {
    embed(c);
    device_.linear(embedded_.data(), parameters_.values(in_weight_), parameters_.values(in_bias_), chunks.size(c),
                   context_width_, hidden, x(0) + chunks.begin(c) * hidden);
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    device_.rms_norm(x(l), tokens, hidden, layer.normed.data());
    for (int64_t c = 0; c < chunks.count(); ++c)
      device_.linear(layer.normed.data() + chunks.begin(c) * hidden, parameters_.values(layer.router_weight), nullptr,
                     chunks.size(c), hidden, options_.experts, layer.logits.data() + chunks.begin(c) * options_.experts);
    moe_[l]->await_experts();
    if (l + 1 < layers_.size()) moe_[l + 1]->fetch_experts(); // it waits for nothing that this layer computes
    moe_[l]->forward(layer.normed.data(), layer.logits.data(), chunks, moe_out_.data());
    device_.add(x(l), moe_out_.data(), tokens * hidden, x(l + 1));
  }

  device_.rms_norm(last_x_.data(), tokens, hidden, last_normed_.data());
  for (int64_t c = 0; c < chunks.count(); ++c)
    device_.linear(last_normed_.data() + chunks.begin(c) * hidden, parameters_.values(out_weight_),
                   parameters_.values(out_bias_), chunks.size(c), hidden, kBytes,
                   grad_out_.data() + chunks.begin(c) * kBytes);
  const float scale = 1 / static_cast<float>(positions.size());
  device_.cross_entropy(grad_out_.data(), targets_.data(), tokens, kBytes, scale, losses_.data());

  std::vector<double> mirror;
  const std::span<const double> losses = losses_.on_host(mirror);
  std::vector<double> chunk_losses;
  for (int64_t c = 0; c < chunks.count(); ++c) {
    const auto of_chunk = losses.subspan(chunks.begin(c), chunks.size(c));
    chunk_losses.push_back(std::accumulate(of_chunk.begin(), of_chunk.end(), 0.0));
  }
  return chunk_losses;
}

void Model::backward(ChunkGrads& chunk_grads) {
  const int64_t tokens = chunks_.num_tokens();
  const int64_t hidden = options_.hidden;
  const int64_t experts = options_.experts;
  chunk_grads.reset(chunks_.count());
  grad_x_.resize(tokens * hidden);
  grad_normed_.resize(tokens * hidden);
  grad_logits_.resize(tokens * experts);
  grad_embedded_.resize(kChunk * context_width_);

  for (int64_t c = 0; c < chunks_.count(); ++c) {
    const int64_t begin = chunks_.begin(c);
    device_.linear_bwd(
        last_normed_.data() + begin * hidden, parameters_.values(out_weight_), grad_out_.data() + begin * kBytes,
        chunks_.size(c), hidden, kBytes,
        {grad_normed_.data() + begin * hidden, chunk_grads.of(c, out_weight_), chunk_grads.of(c, out_bias_)});
  }
  grad_x_.clear();
  device_.rms_norm_bwd(last_x_.data(), grad_normed_.data(), tokens, hidden, grad_x_.data());

  for (size_t l = layers_.size(); l-- > 0;) {
    const Layer& layer = layers_[l];
    moe_[l]->backward(grad_x_.data(), grad_normed_.data(), grad_logits_.data(), chunk_grads);
    for (int64_t c = 0; c < chunks_.count(); ++c) {
      const int64_t begin = chunks_.begin(c);
      device_.linear_bwd(layer.normed.data() + begin * hidden, parameters_.values(layer.router_weight),
                         grad_logits_.data() + begin * experts, chunks_.size(c), hidden, experts,
                         {grad_normed_.data() + begin * hidden, chunk_grads.of(c, layer.router_weight), nullptr, true});
    }
    device_.rms_norm_bwd(layer.x.data(), grad_normed_.data(), tokens, hidden, grad_x_.data());
  }

  for (int64_t c = 0; c < chunks_.count(); ++c) {
    embed(c);
    device_.linear_bwd(embedded_.data(), parameters_.values(in_weight_), grad_x_.data() + chunks_.begin(c) * hidden,
                       chunks_.size(c), context_width_, hidden,
                       {grad_embedded_.data(), chunk_grads.of(c, in_weight_), chunk_grads.of(c, in_bias_)});
    device_.embed_bwd(grad_embedded_.data(), contexts_.data() + chunks_.begin(c) * options_.context,
                      chunks_.size(c) * options_.context, options_.embedding, chunk_grads.of(c, embedding_));
  }
}

} // namespace train
