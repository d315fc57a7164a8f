// SPDX-License-Identifier: Apache-2.0
// The part of the C API that is about blocks and their arenas.
#include <memory>
#include <utility>

#include "base/c_boundary.h"
#include "epx/epx_moe.h"
#include "moe/block/agreement.h"
#include "moe/block/arena.h"
#include "moe/block/block.h"
#include "moe/block/path.h"
#include "moe/tensors.h"

using namespace epx;
using namespace epx::moe;

struct epx_moe_arena_s {
  Arena arena;
};

struct epx_moe_block_s {
  Block block;
};

namespace {

// Runs `create`, which is collective over the group. What throws a StatusError does so on every rank (agree_after); what else
// fails does so here alone, and the others would wait.
template <typename Create>
void create_together(epx_group group, const Create& create) {
  try {
    create();
  } catch (const StatusError&) {
    throw;
  } catch (...) {
    if (group != nullptr) epx_group_abort(group);
    throw;
  }
}

Block& require_block(epx_moe_block block) {
  if (block == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "block is NULL");
  return block->block;
}

void require_block_config(const epx_moe_block_config* config, const char* name) {
  require_struct(config, name);
  require_struct(config->router, "config.router");
  require_struct(config->ffn, "config.ffn");
  if (config->dispatch_format != nullptr) require_struct(config->dispatch_format, "config.dispatch_format");
}

// What an arena is made for.
struct ArenaPlan {
  std::unique_ptr<BlockPath> path;
  int64_t num_rows;
};
ArenaPlan plan_arena(epx_group group, const epx_moe_arena_config& config) {
  if (config.num_flights < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "num_flights is {}; it must be at least 1", config.num_flights);
  if (config.reserved0 != 0) fail(EPX_ERROR_INVALID_ARGUMENT, "reserved0 is {}; it must be 0", config.reserved0);
  for (const int64_t reserved : config.reserved)
    if (reserved != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "a reserved field of the arena's config is {}; it must be 0", reserved);
  std::unique_ptr<BlockPath> path = make_path(group, *config.block);
  const int64_t capacity = path->plan().row_capacity;
  if (group == nullptr && config.max_rows != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "max_rows is {}; without a group no route can be dropped, and it must be 0",
         config.max_rows);
  if (config.max_rows < 0 || config.max_rows > capacity)
    fail(EPX_ERROR_INVALID_ARGUMENT, "max_rows is {}; it must be 0..{}, the group's max_recv_tokens_per_rank",
         config.max_rows, capacity);
  const int64_t num_rows = config.max_rows > 0 ? config.max_rows : capacity;
  arena_bytes(footprint_of(*path, num_rows), config.num_flights); // refuses what is too large
  return {std::move(path), num_rows};
}

} // namespace

epx_status epx_moe_block_config_init(epx_moe_block_config* config, size_t struct_size) {
  return at_c_boundary(__func__, [&] {
    init_struct(config, struct_size, "config");
    config->dtype = EPX_FLOAT32;
    config->alignment = 1;
    config->max_in_flight = 1;
  });
}

epx_status epx_moe_arena_config_init(epx_moe_arena_config* config, size_t struct_size) {
  return at_c_boundary(__func__, [&] {
    init_struct(config, struct_size, "config");
    config->num_flights = 1;
  });
}

epx_status epx_moe_arena_create(epx_group group, const epx_moe_arena_config* config, epx_moe_arena* arena) {
  return at_c_boundary(__func__, [&] {
    require_struct(config, "config");
    require_block_config(config->block, "config.block");
    if (arena == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "arena is NULL");
    create_together(group, [&] {
      ArenaPlan plan;
      agree_after(group, Options(*config), [&] { plan = plan_arena(group, *config); });
      *arena = new epx_moe_arena_s{Arena(group, *plan.path, plan.num_rows, config->num_flights)};
    });
  });
}

epx_status epx_moe_arena_destroy(epx_moe_arena arena) {
  const std::unique_ptr<epx_moe_arena_s> owner(arena);
  return at_c_boundary(__func__, [&] {
    if (owner != nullptr) owner->arena.release();
  });
}

void epx_moe_arena_destroy_local(epx_moe_arena arena) {
  delete arena;
}

epx_status epx_moe_arena_query(epx_moe_arena arena, epx_moe_arena_info* info) {
  return at_c_boundary(__func__, [&] {
    if (arena == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "arena is NULL");
    require_struct(info, "info");
    *info = arena->arena.info();
  });
}

epx_status epx_moe_block_create(epx_group group, const epx_moe_block_config* config, epx_moe_block* block) {
  return at_c_boundary(__func__, [&] {
    require_block_config(config, "config");
    if (block == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "block is NULL");
    Arena* const shared = config->arena != nullptr ? &config->arena->arena : nullptr;
    create_together(group, [&] { *block = new epx_moe_block_s{Block(group, *config, shared)}; });
  });
}

epx_status epx_moe_block_destroy(epx_moe_block block) {
  const std::unique_ptr<epx_moe_block_s> owner(block);
  return at_c_boundary(__func__, [&] {
    if (owner != nullptr) owner->block.release();
  });
}

void epx_moe_block_destroy_local(epx_moe_block block) {
  delete block;
}

epx_status epx_moe_block_fwd(epx_moe_block block, const epx_moe_block_fwd_args* args) {
  return at_c_boundary(__func__, [&] {
    require_args(args);
    require_block(block).forward(*args);
  });
}

epx_status epx_moe_block_bwd(epx_moe_block block, const epx_moe_block_bwd_args* args) {
  return at_c_boundary(__func__, [&] {
    require_args(args);
    require_block(block).backward(*args);
  });
}

epx_status epx_moe_block_errors(epx_moe_block block, epx_moe_errors_report* report) {
  return at_c_boundary(__func__, [&] { require_block(block).read_errors(report); });
}
