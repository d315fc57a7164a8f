// SPDX-License-Identifier: Apache-2.0
// The model is: embeddings of the last bytes -> linear -> residual MoE layers -> linear -> distribution of the next byte.
//   x_0 = in_weight * [embedding of each byte of the context] + in_bias
//   x_(l+1) = x_l + moe_l(rms_norm(x_l)), with the router's logits = router_weight_l * rms_norm(x_l)
//   logits = out_weight * rms_norm(x_L) + out_bias
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "apps/train_moe/array.h"
#include "apps/train_moe/chunks.h"
#include "apps/train_moe/device.h"
#include "apps/train_moe/mesh.h"
#include "apps/train_moe/moe_layer.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/parameters.h"
#include "apps/train_moe/text.h"

namespace train {

class Model {
public:
  // Declares the model's parameters. Experts' are sharded over the mesh, unless all are replicated.
  Model(Device& device, const ModelOptions& options, Parameters& parameters, const Mesh& mesh, bool replicate_experts);

  // Returns the experts of each layer, for the code that makes the layers.
  const std::vector<Experts>& experts() const { return experts_; }
  void set_layers(std::vector<std::unique_ptr<MoeLayer>> layers) { moe_ = std::move(layers); }
  void swap_layers(std::vector<std::unique_ptr<MoeLayer>>& layers) { moe_.swap(layers); }
  const std::vector<std::unique_ptr<MoeLayer>>& layers() const { return moe_; }

  // Predicts the bytes of `text` at this rank's `positions`, and returns the summed loss of each chunk in nats. Collective.
  std::vector<double> forward(const Text& text, std::span<const int64_t> positions, const Chunks& chunks);

  // What the router and the experts of a layer got in the last forward, [T, H].
  const float* moe_input(size_t layer) const { return layers_[layer].normed.data(); }

  // Computes the gradients of (sum of all ranks' losses) / (predicted bytes of all ranks) for the last forward, whose
  // loss_scale was 1 / (predicted bytes). Collective. Overwrites chunk_grads and the gradients of sharded parameters.
  void backward(ChunkGrads& chunk_grads);

private:
  using Id = Parameters::Id;

  struct Layer {
    Layer(Device& device, Id weight) : router_weight(weight), x(device), normed(device), logits(device) {}

    Id router_weight;
    Array<float> x, normed, logits; // [T, H], [T, H], [T, E]
  };

  // Writes the embeddings of a chunk's contexts into embedded_.
  void embed(int64_t chunk);

  Device& device_;
  ModelOptions options_;
  Parameters& parameters_;
  int64_t context_width_; // elements of a context's embeddings
  Id embedding_, in_weight_, in_bias_, out_weight_, out_bias_;
  std::vector<Experts> experts_;
  std::vector<Layer> layers_;
  std::vector<std::unique_ptr<MoeLayer>> moe_;

  // These are of the last forward.
  Chunks chunks_{0, 0, 1};
  Array<unsigned char> contexts_, targets_;      // [T, context], [T]
  Array<float> last_x_, last_normed_, grad_out_; // [T, H], [T, H], [T, 256]
  Array<double> losses_;                         // [T]

  // Memory of a call, kept for the next one: [chunk, context * embedding] twice, [T, H], and what backward computes.
  Array<float> embedded_, grad_embedded_, moe_out_, grad_x_, grad_normed_, grad_logits_;
};

} // namespace train
