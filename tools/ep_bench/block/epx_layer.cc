// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/epx_layer.h"

namespace epx::bench {

moe::RouterConfig router_config(const Options& options) {
  moe::RouterConfig config;
  config.num_experts = options.experts;
  config.top_k = options.top_k;
  return config;
}

moe::FfnConfig ffn_config(const Options& options, int32_t num_local_experts) {
  moe::FfnConfig config;
  config.num_local_experts = num_local_experts;
  config.hidden_dim = options.hidden;
  config.ffn_dim = options.block.ffn;
  return config;
}

EpxLayer::EpxLayer(GroupView group, const Options& options, const BlockData& data, Memory& memory)
    : group_(group), data_(data), calls_(memory) {
  moe::BlockConfig config;
  config.router = router_config(options);
  config.ffn = ffn_config(options, 0);
  config.dtype = options.dtype;
  config.alignment = options.alignment > 0 ? options.alignment : 1;
  block_ = moe::Block(group, config);
}

EpxLayer::~EpxLayer() {
  if (block_) group_.abort(); // this rank has failed, and its peers may wait for it
}

void EpxLayer::forward() {
  calls_.run(
      moe::BlockFwdArgs{.tokens = data_.tokens(), .logits = data_.logits(), .params = data_.params(), .out = data_.out()},
      [&](const auto& args) { block_.fwd(args); });
}

void EpxLayer::backward() {
  calls_.run(moe::BlockBwdArgs{.params = data_.params(),
                               .grad_out = data_.grad_out(),
                               .grad_tokens = data_.grad_tokens(),
                               .grad_logits = data_.grad_logits(),
                               .grads = data_.grads()},
             [&](const auto& args) { block_.bwd(args); });
}

} // namespace epx::bench
