// SPDX-License-Identifier: Apache-2.0
// One MoE layer: router -> prepare -> dispatch -> FFN -> combine, and back. Written against Exchange, so that a block with a
// group and a local one are the same code.
#pragma once

#include <memory>

#include "epx/epx_moe.h"

namespace epx::moe {

class Block {
public:
  virtual ~Block() = default;

  // Check their arguments before anything happens; throw.
  virtual void forward(const epx_moe_block_fwd_args& args) = 0;
  virtual void backward(const epx_moe_block_bwd_args& args) = 0;

  // Gives back what the group lends. Collective; before the destructor.
  virtual void release() = 0;
};

// Collective over the group, which may be NULL. Throws before the group makes a call if the config is no good.
std::unique_ptr<Block> make_block(epx_group group, const epx_moe_block_config& config);

} // namespace epx::moe
