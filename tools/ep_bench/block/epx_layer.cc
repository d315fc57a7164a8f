// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/epx_layer.h"

#include <utility>

namespace epx::bench {

epx_moe_router_config router_config(const Options& options) {
  epx_moe_router_config config;
  require_success(epx_moe_router_config_init(&config, sizeof(config)), "epx_moe_router_config_init");
  config.num_experts = options.experts;
  config.top_k = options.top_k;
  return config;
}

epx_moe_ffn_config ffn_config(const Options& options, int32_t num_local_experts) {
  epx_moe_ffn_config config;
  require_success(epx_moe_ffn_config_init(&config, sizeof(config)), "epx_moe_ffn_config_init");
  config.num_local_experts = num_local_experts;
  config.hidden_dim = options.hidden;
  config.ffn_dim = options.block.ffn;
  return config;
}

EpxLayer::EpxLayer(GroupView group, const Options& options, const BlockData& data, Memory& memory)
    : group_(group), data_(data), calls_(memory) {
  const epx_moe_router_config router = router_config(options);
  const epx_moe_ffn_config ffn = ffn_config(options, 0);
  epx_moe_block_config config;
  require_success(epx_moe_block_config_init(&config, sizeof(config)), "epx_moe_block_config_init");
  config.router = &router;
  config.ffn = &ffn;
  config.dtype = options.dtype;
  config.alignment = options.alignment > 0 ? options.alignment : 1;
  require_success(epx_moe_block_create(group.get(), &config, &block_), "epx_moe_block_create");
}

EpxLayer::~EpxLayer() {
  if (block_ == nullptr) return;
  group_.abort(); // this rank has failed, and its peers may never destroy their blocks
  epx_moe_block_destroy(block_);
}

void EpxLayer::forward() {
  epx_moe_block_fwd_args args{};
  args.tokens = &data_.tokens();
  args.logits = &data_.logits();
  args.params = &data_.params();
  args.out = &data_.out();
  calls_.run("epx_moe_block_fwd", args, [&](const auto* forward) { return epx_moe_block_fwd(block_, forward); });
}

void EpxLayer::backward() {
  epx_moe_block_bwd_args args{};
  args.params = &data_.params();
  args.grad_out = &data_.grad_out();
  args.grad_tokens = &data_.grad_tokens();
  args.grad_logits = &data_.grad_logits();
  args.grads = &data_.grads();
  calls_.run("epx_moe_block_bwd", args, [&](const auto* backward) { return epx_moe_block_bwd(block_, backward); });
}

void EpxLayer::release() {
  require_success(epx_moe_block_destroy(std::exchange(block_, nullptr)), "epx_moe_block_destroy");
}

} // namespace epx::bench
