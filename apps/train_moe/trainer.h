// SPDX-License-Identifier: Apache-2.0
// A Trainer trains one model: it has the parameters, the layers on one path, and the optimiser.
#pragma once

#include <memory>
#include <vector>

#include "apps/train_moe/device.h"
#include "apps/train_moe/format_errors.h"
#include "apps/train_moe/fsdp.h"
#include "apps/train_moe/mesh.h"
#include "apps/train_moe/model.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/parameters.h"
#include "apps/train_moe/text.h"
#include "apps/train_moe/world.h"
#include "epx/epx.hpp"

namespace train {

// How the routing of a forward used the receive capacity. All ranks have the same numbers.
struct CapacityUse {
  int64_t dropped = 0;        // routes, of all layers and ranks
  double required_factor = 0; // the least --capacity-factor that drops nothing, over all layers
  double max_load = 0;        // routes to the fullest rank over those of balanced routing, over all layers
  bool ran_again = false;     // with room for any routing, so the loss is that of no drops
};

struct StepResult {
  double loss = 0;          // nats per byte, before the update
  double seconds = 0;       // of the slowest rank
  std::vector<double> load; // per layer
  CapacityUse capacity;
  // Over the FSDP axes, of all ranks.
  Traffic experts, shared;
};

class Trainer {
public:
  // Collective. `path` is not both. The device must outlive the trainer.
  Trainer(const World& world, const Mesh& mesh, Device& device, const Options& options, const Text& text, Path path);

  Path path() const { return path_; }
  Parameters& parameters() { return parameters_; }
  const Model& model() const { return model_; }

  // Steps count from 1. Collective. Throws AgreedError when router logits are no longer numbers.
  StepResult step(int64_t step);

  // Returns the error of each row format on the tokens of each layer in the last forward. The path is dispatch. Collective.
  std::vector<std::vector<FormatError>> format_errors();

  // Returns the loss in nats per byte over the held-out part. Collective.
  double held_out_loss();

private:
  std::vector<std::unique_ptr<MoeLayer>> make_epx_layers(epx::GroupView group);
  CapacityUse capacity_use() const; // of the last forward
  // Collective. Of all ranks, over an axis that may be NULL.
  Traffic traffic_since(const Traffic& before, const FsdpAxis* axis) const;

  // Computes a forward and returns its loss. Where it drops routes and --on-overflow is rerun, it is computed again, by layers
  // that have room for any routing. These stay the model's until end_rerun().
  double forward(const std::vector<int64_t>& positions, const Chunks& chunks, const char* when, int64_t step,
                 CapacityUse& use);
  void end_rerun(const CapacityUse& use);
  double mean_loss(const std::vector<int64_t>& positions, const Chunks& chunks, const char* when, int64_t step);

  const World& world_;
  Mesh mesh_;
  Device& device_;
  const Options& options_;
  const Text& text_;
  Path path_;
  // With --fsdp. That of the shared parameters has all ranks, so it contains the EP axis.
  std::unique_ptr<FsdpAxis> experts_axis_, shared_axis_;
  Parameters parameters_;
  epx::Group group_;      // empty when no layer is one of epx; outlives the blocks in model_
  epx::Group full_group_; // with room for any routing, once a step needed it
  Model model_;
  std::vector<std::unique_ptr<MoeLayer>> full_layers_; // on full_group_
  ChunkGrads chunk_grads_;
  std::vector<float> chunk_grads_mirror_, summed_grads_; // memory of a step
};

} // namespace train
