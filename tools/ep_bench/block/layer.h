// SPDX-License-Identifier: Apache-2.0
// A whole MoE layer as --block measures it: from tokens and logits to out, and back.
#pragma once

#include "epx/epx_moe.hpp"
#include "tools/ep_bench/options.h"

namespace epx::bench {

class BlockLayer {
public:
  virtual ~BlockLayer() = default;

  virtual const char* name() const = 0;

  // Collective. On a GPU they enqueue.
  virtual void forward() = 0;
  virtual void backward() = 0; // of the last forward

  // What a trainer does once a step with weights that the layer takes in FP8. On a GPU it enqueues.
  virtual bool quantises_weights() const { return false; }
  virtual void quantise_weights() {}

  // True where neither waits for the device, so that they can be captured in a graph.
  virtual bool can_be_captured() const = 0;

  // To be called after a forward and a backward of the set that is timed: later calls need no more memory.
  virtual void keep_memory() = 0;

  // Gives back what the group lends, once the device is idle. Collective.
  virtual void release() = 0;
};

// Return the configs that the options ask for. Throw epx::Error.
moe::RouterConfig router_config(const Options& options);
moe::FfnConfig ffn_config(const Options& options, int32_t num_local_experts);

} // namespace epx::bench
