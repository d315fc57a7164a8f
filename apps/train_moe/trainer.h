// SPDX-License-Identifier: Apache-2.0
// A Trainer trains one model: it has the parameters, the layers on one kind of exchange, and the optimiser.
#pragma once

#include <memory>
#include <vector>

#include "apps/train_moe/device.h"
#include "apps/train_moe/format_errors.h"
#include "apps/train_moe/model.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/parameters.h"
#include "apps/train_moe/text.h"
#include "apps/train_moe/world.h"
#include "epx/epx.hpp"

namespace train {

struct StepResult {
  double loss = 0;          // nats per byte, before the update
  double seconds = 0;       // of the slowest rank
  std::vector<double> load; // per layer
};

class Trainer {
public:
  // Collective. `exchange` is not both. The device must outlive the trainer.
  Trainer(const World& world, Device& device, const Options& options, const Text& text, Exchange exchange);

  Exchange exchange() const { return exchange_; }
  Parameters& parameters() { return parameters_; }
  const Model& model() const { return model_; }

  // Steps count from 1. Collective. Throws AgreedError when router logits are no longer numbers.
  StepResult step(int64_t step);

  // Returns the error of each row format on the tokens of each layer in the last forward. The exchange is epx. Collective.
  std::vector<std::vector<FormatError>> format_errors();

  // Returns the loss in nats per byte over the held-out part. Collective.
  double held_out_loss();

private:
  double mean_loss(const std::vector<int64_t>& positions, const Chunks& chunks, const char* when, int64_t step);

  const World& world_;
  Device& device_;
  const Options& options_;
  const Text& text_;
  Exchange exchange_;
  Parameters parameters_;
  epx::Group group_; // empty when no layer is one of epx; outlives the blocks in model_
  Model model_;
  ChunkGrads chunk_grads_;
  std::vector<float> chunk_grads_mirror_, summed_grads_; // memory of a step
};

} // namespace train
