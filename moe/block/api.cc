// SPDX-License-Identifier: Apache-2.0
// The block's part of the C API.
#include "base/c_boundary.h"
#include "epx/epx_moe.h"
#include "moe/block/block.h"
#include "moe/tensors.h"

using namespace epx;
using namespace epx::moe;

struct epx_moe_block_s {
  std::unique_ptr<Block> block;
};

epx_status epx_moe_block_config_init(epx_moe_block_config* config) {
  return at_c_boundary(__func__, [&] {
    if (config == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "config is NULL");
    *config = {};
    config->struct_size = sizeof(*config);
    epx::require_success(epx_moe_router_config_init(&config->router), "epx_moe_router_config_init");
    epx::require_success(epx_moe_ffn_config_init(&config->ffn), "epx_moe_ffn_config_init");
    config->dtype = EPX_FLOAT32;
    config->alignment = 1;
    config->max_in_flight = 1;
  });
}

epx_status epx_moe_block_create(epx_group group, const epx_moe_block_config* config, epx_moe_block* block) {
  return at_c_boundary(__func__, [&] {
    require_struct(config, "config");
    if (block == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "block is NULL");
    *block = new epx_moe_block_s{make_block(group, *config)};
  });
}

epx_status epx_moe_block_destroy(epx_moe_block block) {
  const std::unique_ptr<epx_moe_block_s> owner(block);
  return at_c_boundary(__func__, [&] {
    if (owner != nullptr) owner->block->release();
  });
}

epx_status epx_moe_block_fwd(epx_moe_block block, const epx_moe_block_fwd_args* args) {
  return at_c_boundary(__func__, [&] {
    if (block == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "block is NULL");
    require_host_args(args);
    block->block->forward(*args);
  });
}

epx_status epx_moe_block_bwd(epx_moe_block block, const epx_moe_block_bwd_args* args) {
  return at_c_boundary(__func__, [&] {
    if (block == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "block is NULL");
    require_host_args(args);
    block->block->backward(*args);
  });
}
