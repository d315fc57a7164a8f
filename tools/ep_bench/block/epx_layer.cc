// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/epx_layer.h"

#include <fmt/format.h>

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

EpxLayer::EpxLayer(GroupView group, const Options& options, epx_moe_recipe recipe, epx_moe_path path, const BlockData& data,
                   Memory& memory)
    : name_("block"), group_(group), data_(data), calls_(memory) {
  moe::BlockConfig config;
  config.router = router_config(options);
  config.ffn = ffn_config(options, 0);
  config.dtype = options.dtype;
  config.alignment = options.alignment > 0 ? options.alignment : 1;
  if (recipe != EPX_MOE_RECIPE_WIDE) {
    name_ += fmt::format("-{}", to_string(recipe));
    config.recipe = recipe;
    config.weighting = EPX_MOE_WEIGHT_EARLY;
    quantised_.emplace(data, memory).quantise();
  }
  if (path != EPX_MOE_PATH_DISPATCH) {
    name_ += fmt::format("-{}", to_string(path));
    config.path = path;
    config.weighting = EPX_MOE_WEIGHT_EARLY;
  }
  block_ = moe::Block(group, config);
}

std::optional<moe::Fp8Params> EpxLayer::fp8_params() const {
  return quantised_ ? std::optional(quantised_->params()) : std::nullopt;
}

EpxLayer::~EpxLayer() {
  if (block_) group_.abort(); // this rank has failed, and its peers may wait for it
}

void EpxLayer::forward() {
  calls_.run(moe::BlockFwdArgs{.tokens = data_.tokens(),
                               .logits = data_.logits(),
                               .params = data_.params(),
                               .fp8_params = fp8_params(),
                               .out = data_.out()},
             [&](const auto& args) { block_.fwd(args); });
}

void EpxLayer::backward() {
  calls_.run(moe::BlockBwdArgs{.params = data_.params(),
                               .fp8_params = fp8_params(),
                               .grad_out = data_.grad_out(),
                               .grad_tokens = data_.grad_tokens(),
                               .grad_logits = data_.grad_logits(),
                               .grads = data_.grads()},
             [&](const auto& args) { block_.bwd(args); });
}

} // namespace epx::bench
