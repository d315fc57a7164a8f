// SPDX-License-Identifier: Apache-2.0
#include "examples/train_moe/model.h"

#include <algorithm>
#include <cmath>

#include "examples/train_moe/network.h"

namespace train {
namespace {

constexpr int64_t kBytes = 256; // values of a byte

double init_limit(int64_t fan_in) { // uniform with variance 1 / fan_in
  return std::sqrt(3.0 / static_cast<double>(fan_in));
}

} // namespace

Model::Model(const ModelOptions& options, Parameters& parameters, Ownership mine, bool replicate_experts)
    : options_(options), parameters_(parameters), embedded_(static_cast<int64_t>(options.context) * options.embedding) {
  const int64_t hidden = options.hidden;
  const int64_t ffn = options.ffn;
  const auto add_experts = [&](const std::string& name, std::vector<int64_t> shape, double limit) {
    return replicate_experts ? parameters.add_replicated(name, std::move(shape), limit)
                             : parameters.add_sharded(name, std::move(shape), limit, mine.first, mine.count);
  };
  embedding_ = parameters.add_replicated("embedding", {kBytes, options.embedding}, std::sqrt(3.0));
  in_weight_ = parameters.add_replicated("in_weight", {hidden, embedded_}, init_limit(embedded_));
  in_bias_ = parameters.add_replicated("in_bias", {hidden}, 0, false);
  for (int l = 0; l < options.layers; ++l) {
    const std::string prefix = fmt::format("layer{}.", l);
    layers_.push_back(
        {parameters.add_replicated(prefix + "router_weight", {options.experts, hidden}, init_limit(hidden)), {}, {}, {}});
    experts_.push_back({add_experts(prefix + "gate_up_weight", {options.experts, 2 * ffn, hidden}, init_limit(hidden)),
                        add_experts(prefix + "down_weight", {options.experts, hidden, ffn}, init_limit(ffn))});
  }
  out_weight_ = parameters.add_replicated("out_weight", {kBytes, hidden}, 0.1 * init_limit(hidden));
  out_bias_ = parameters.add_replicated("out_bias", {kBytes}, 0, false);
}

void Model::embed(int64_t first, int64_t rows, float* out) const {
  const float* const table = parameters_.values(embedding_);
  const int64_t width = options_.embedding;
  for (int64_t i = 0; i < rows * options_.context; ++i)
    std::copy_n(table + contexts_[first * options_.context + i] * width, width, out + i * width);
}

std::vector<double> Model::forward(const Text& text, std::span<const int64_t> positions, const Chunks& chunks) {
  const int64_t tokens = chunks.num_tokens();
  const int64_t hidden = options_.hidden;
  chunks_ = chunks;
  contexts_.clear();
  targets_.clear();
  for (const int64_t position : positions.subspan(chunks.first_token(), tokens)) {
    contexts_.insert(contexts_.end(), text.bytes.begin() + position - options_.context, text.bytes.begin() + position);
    targets_.push_back(text.bytes[position]);
  }

  std::vector<float> embedded(kChunk * embedded_), x(tokens * hidden), moe_out(tokens * hidden);
  for (int64_t c = 0; c < chunks.count(); ++c) {
    embed(chunks.begin(c), chunks.size(c), embedded.data());
    linear<float>(embedded.data(), parameters_.values(in_weight_), parameters_.values(in_bias_), chunks.size(c), embedded_,
                  hidden, x.data() + chunks.begin(c) * hidden);
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    layer.x = x;
    layer.normed.resize(tokens * hidden);
    layer.logits.resize(tokens * options_.experts);
    rms_norm<float>(x.data(), tokens, hidden, layer.normed.data());
    for (int64_t c = 0; c < chunks.count(); ++c)
      linear<float>(layer.normed.data() + chunks.begin(c) * hidden, parameters_.values(layer.router_weight), nullptr,
                    chunks.size(c), hidden, options_.experts, layer.logits.data() + chunks.begin(c) * options_.experts);
    moe_[l]->forward(layer.normed.data(), layer.logits.data(), chunks, moe_out.data());
    for (size_t i = 0; i < x.size(); ++i)
      x[i] += moe_out[i];
  }

  last_x_ = x;
  last_normed_.resize(tokens * hidden);
  grad_out_.resize(tokens * kBytes);
  rms_norm<float>(x.data(), tokens, hidden, last_normed_.data());
  const float scale = 1 / static_cast<float>(positions.size());
  std::vector<double> losses;
  for (int64_t c = 0; c < chunks.count(); ++c) {
    float* const logits = grad_out_.data() + chunks.begin(c) * kBytes;
    linear<float>(last_normed_.data() + chunks.begin(c) * hidden, parameters_.values(out_weight_),
                  parameters_.values(out_bias_), chunks.size(c), hidden, kBytes, logits);
    losses.push_back(cross_entropy<float>(logits, targets_.data() + chunks.begin(c), chunks.size(c), kBytes, scale));
  }
  return losses;
}

void Model::backward(ChunkGrads& chunk_grads) {
  const int64_t tokens = chunks_.num_tokens();
  const int64_t hidden = options_.hidden;
  const int64_t experts = options_.experts;
  chunk_grads.resize(chunks_.count());
  for (std::vector<float>& grads : chunk_grads)
    grads.assign(parameters_.replicated().values.size(), 0.0f);

  std::vector<float> grad_x(tokens * hidden), grad_normed(tokens * hidden), grad_logits(tokens * experts);
  for (int64_t c = 0; c < chunks_.count(); ++c) {
    const int64_t begin = chunks_.begin(c);
    linear_bwd<float>(last_normed_.data() + begin * hidden, parameters_.values(out_weight_),
                      grad_out_.data() + begin * kBytes, chunks_.size(c), hidden, kBytes,
                      {grad_normed.data() + begin * hidden, parameters_.in(chunk_grads[c], out_weight_),
                       parameters_.in(chunk_grads[c], out_bias_)});
  }
  rms_norm_bwd<float>(last_x_.data(), grad_normed.data(), tokens, hidden, grad_x.data());

  for (size_t l = layers_.size(); l-- > 0;) {
    const Layer& layer = layers_[l];
    moe_[l]->backward(grad_x.data(), grad_normed.data(), grad_logits.data(), chunk_grads);
    for (int64_t c = 0; c < chunks_.count(); ++c) {
      const int64_t begin = chunks_.begin(c);
      linear_bwd<float>(
          layer.normed.data() + begin * hidden, parameters_.values(layer.router_weight),
          grad_logits.data() + begin * experts, chunks_.size(c), hidden, experts,
          {grad_normed.data() + begin * hidden, parameters_.in(chunk_grads[c], layer.router_weight), nullptr, true});
    }
    rms_norm_bwd<float>(layer.x.data(), grad_normed.data(), tokens, hidden, grad_x.data());
  }

  std::vector<float> embedded(kChunk * embedded_), grad_embedded(kChunk * embedded_);
  for (int64_t c = 0; c < chunks_.count(); ++c) {
    const int64_t begin = chunks_.begin(c);
    embed(begin, chunks_.size(c), embedded.data());
    linear_bwd<float>(
        embedded.data(), parameters_.values(in_weight_), grad_x.data() + begin * hidden, chunks_.size(c), embedded_, hidden,
        {grad_embedded.data(), parameters_.in(chunk_grads[c], in_weight_), parameters_.in(chunk_grads[c], in_bias_)});
    float* const grad_table = parameters_.in(chunk_grads[c], embedding_);
    for (int64_t i = 0; i < chunks_.size(c) * options_.context; ++i)
      for (int64_t j = 0; j < options_.embedding; ++j)
        grad_table[contexts_[begin * options_.context + i] * options_.embedding + j] +=
            grad_embedded[i * options_.embedding + j];
  }
}

} // namespace train
