// SPDX-License-Identifier: Apache-2.0
// MoeLayer is one MoE layer as the model uses it; the implementations differ in how tokens reach their experts. Those of
// epx compute on any Device, the others on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "apps/train_moe/chunks.h"
#include "apps/train_moe/device.h"
#include "apps/train_moe/experts.h"
#include "apps/train_moe/mesh.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/parameters.h"
#include "apps/train_moe/world.h"
#include "epx/epx.hpp"

namespace train {

class MoeLayer {
public:
  virtual ~MoeLayer() = default;

  // The first begins to fetch the weights of this layer's experts from ranks that keep them, so that a layer before computes
  // meanwhile. The second has the device wait for them. A forward comes after both. Collective.
  virtual void fetch_experts() {}
  virtual void await_experts() {}

  // Computes tokens[T, H], logits[T, E] -> out[T, H], in memory of the layer's device. It is collective, unless experts are
  // replicated.
  virtual void forward(const float* tokens, const float* logits, const Chunks& chunks, float* out) = 0;

  // Computes the gradients of the last forward, whose tokens and logits must be unchanged. Gradients of sharded experts become
  // those of all ranks' tokens; those of replicated ones are added to chunk_grads.
  virtual void backward(const float* grad_out, float* grad_tokens, float* grad_logits, ChunkGrads& chunk_grads) = 0;

  // How the routing of the last forward used the receive capacity: the same on all ranks. Zeros where there is none.
  virtual epx_load_report capacity_use() const { return {}; }

  // Throws when the device has seen bad data in a call of this layer. Calls that it has not finished are not seen.
  virtual void require_no_device_errors() const {}

  // Of the last forward.
  const std::vector<int32_t>& topk_idx() const { return topk_idx_; } // [T, K]
  int64_t bad_tokens() const { return info_[1]; }                    // tokens with logits that are not numbers
  int64_t first_bad_token() const { return info_[2]; }
  double load() const; // routes to the busiest expert over the mean

protected:
  MoeLayer(const ModelOptions& model, double aux_loss);

  ModelOptions model_;
  double aux_loss_;
  std::vector<int32_t> topk_idx_;      // [T, K]
  std::vector<int32_t> global_counts_; // [P, E], of all ranks
  int64_t info_[3] = {0, 0, -1};       // as epx_moe_router writes it
};

// Creates the group of this rank's EP axis, through which epx layers exchange their tokens, in memory of the device. A rank has room for
// capacity_factor * max_tokens * top_k rows; with a factor of 0 for any routing. Collective.
epx::Group make_group(const World& world, const Mesh& mesh, const Device& device, const Options& options,
                      int64_t max_tokens, double capacity_factor);
void require_no_events(epx::GroupView group); // throws when the group has dropped or refused anything

std::unique_ptr<MoeLayer> make_epx_layer(epx::GroupView group, const World& world, const Mesh& mesh, Device& device,
                                         const Options& options, std::unique_ptr<ExpertWeights> experts);
std::unique_ptr<MoeLayer> make_alltoallv_layer(const World& world, const ModelOptions& model, double aux_loss,
                                               Parameters& parameters, Experts experts);
std::unique_ptr<MoeLayer> make_dense_layer(const World& world, const ModelOptions& model, double aux_loss,
                                           Parameters& parameters, Experts experts);
std::unique_ptr<MoeLayer> make_replicated_layer(const World& world, const ModelOptions& model, double aux_loss,
                                                Parameters& parameters, Experts experts);

} // namespace train
