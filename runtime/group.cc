// SPDX-License-Identifier: Apache-2.0
#include "runtime/group.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/names.h"
#include "base/random.h"
#include "runtime/group_transport.h"
#include "runtime/layout/planner.h"
#include "runtime/struct_size.h"
#include "runtime/tuning/tuning.h"
#include "transport/bootstrap/bootstrap_exchange.h"
#include "transport/control/control_connection.h"
#include "transport/interrupt.h"
#include "transport/topology/nodes.h"
#include "transport/topology/rank_place.h"

namespace epx {
namespace {

// Each rank of the bootstrap contributes a hello first.
struct RankHello {
  int32_t version; // stands here in 0.1 as well
  epx_group_config config;
  uint64_t proposed_group_id; // the group takes that of its first rank
};

// Returns the ranks of the bootstrap that passed `color`, ordered by (key, rank).
std::vector<int> members_of(const std::vector<RankHello>& world, int32_t color) {
  std::vector<int> members;
  for (size_t rank = 0; rank < world.size(); ++rank)
    if (world[rank].config.color == color) members.push_back(static_cast<int>(rank));
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return world[static_cast<size_t>(a)].config.key < world[static_cast<size_t>(b)].config.key;
  });
  return members;
}

// Every rank checks every group, so that all ranks fail alike and none waits for one that has left.
void require_consistent(const std::vector<RankHello>& world) {
  for (size_t rank = 0; rank < world.size(); ++rank) {
    const std::vector<int> members = members_of(world, world[rank].config.color);
    if (members.front() != static_cast<int>(rank)) continue; // each group once
    std::vector<epx_group_config> configs;
    configs.reserve(members.size());
    for (const int member : members)
      configs.push_back(world[static_cast<size_t>(member)].config);
    require_agreement(configs, members);
    plan_memory(resolve(configs.front(), static_cast<int>(members.size())),
                configs.front().transport); // throws where too large
  }
}

// Returns how many ranks each node of this rank's group has. All ranks of the group throw alike: UNSUPPORTED or
// INVALID_ARGUMENT.
int resolve_ranks_per_node(const GroupShape& shape, const epx_group_config& config, epx_transport transport,
                           std::span<const RankPlace> places) {
  if (transport == EPX_TRANSPORT_HOST) { // its memory reaches all ranks, so that nodes are what the config says
    require_one_machine(places);
    return shape.ranks_per_node;
  }
  const int found = find_ranks_per_node(places);
  if (config.ranks_per_node != 0 && config.ranks_per_node != found)
    fail(EPX_ERROR_INVALID_ARGUMENT, "epx_group_config.ranks_per_node is {}, but the {} ranks of the group are on {}",
         config.ranks_per_node, shape.num_ranks, describe_nodes(places, found));
  return found;
}

void require_bootstrap(const epx_bootstrap& bootstrap) {
  require_fixed_size("epx_bootstrap", bootstrap.struct_size, sizeof(epx_bootstrap));
  if (bootstrap.num_ranks < 1 || bootstrap.num_ranks > kMaxRanks)
    fail(EPX_ERROR_INVALID_ARGUMENT, "epx_bootstrap.num_ranks is {}; it must be 1..{}", bootstrap.num_ranks, kMaxRanks);
  if (bootstrap.rank < 0 || bootstrap.rank >= bootstrap.num_ranks)
    fail(EPX_ERROR_INVALID_ARGUMENT, "epx_bootstrap.rank is {}; it must be 0..{}", bootstrap.rank, bootstrap.num_ranks - 1);
  if (bootstrap.all_gather == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "epx_bootstrap.all_gather is NULL");
  if (std::ranges::any_of(bootstrap.reserved, [](const void* value) { return value != nullptr; }))
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "epx_bootstrap has a reserved field that is not NULL: zero the struct before setting fields");
}

void require_environment() {
  const Environment& env = environment();
  if (env.check_handle_mem_text && !env.check_handle_mem)
    fail(EPX_ERROR_INVALID_ARGUMENT, "the environment variable EPX_CHECK_HANDLE_MEM is \"{}\"; it must be 0 or 1",
         *env.check_handle_mem_text);
  if (env.log_text && *env.log_text != env.log_level)
    fail(EPX_ERROR_INVALID_ARGUMENT, "the environment variable EPX_LOG is \"{}\"; it must be one of {}", *env.log_text,
         fmt::join(kLogLevels, ", "));
  with_entries(Tuning{}, env.tuning); // throws where one is wrong
}

// The call is collective over the bootstrap.
std::vector<RankHello> say_hello(const epx_group_config& config, Exchange& exchange) {
  std::vector<RankHello> world = exchange.all_gather([&] {
    validate(config);
    require_environment();
    require_not_interrupted("epx_group_create");
    return RankHello{kLibraryVersion, config, random_u64()};
  });
  require_consistent(world);
  return world;
}

// The call is collective. Returns the shape with its nodes. A group without the nodes that it needs fails all ranks of the
// bootstrap.
GroupShape find_nodes(GroupShape shape, const epx_group_config& config, epx_transport transport,
                      BootstrapExchange& exchange) {
  const std::vector<RankPlace> places = exchange.all_gather([&] { return find_place(transport); });
  const bool all_have_one_node = exchange.all_of([&] {
    shape.ranks_per_node = resolve_ranks_per_node(shape, config, transport, places);
    return shape.num_nodes() == 1;
  });
  if (!all_have_one_node) exchange.let_steps_differ();
  return shape;
}

// The call is collective. Groups of several nodes share no memory in which a rank's death would show; others need no control
// connection.
std::unique_ptr<ControlConnection> connect_control(const GroupShape& shape, int rank, int64_t timeout_ms,
                                                   Exchange& exchange) {
  if (shape.num_nodes() == 1) return nullptr;
  return std::make_unique<ControlConnection>(rank, shape.num_ranks, std::chrono::milliseconds(timeout_ms), exchange);
}

} // namespace

std::unique_ptr<Group> Group::create(const epx_bootstrap& bootstrap, const epx_group_config& config) {
  require_bootstrap(bootstrap);
  // A rank whose config is refused still reports that to the others, and waits for them as long as ranks do by default.
  const bool has_timeout = config.struct_size == sizeof(config) && config.timeout_ms > 0;
  BootstrapExchange exchange(bootstrap, has_timeout ? config.timeout_ms : default_timeout_ms());
  try {
    return create(bootstrap, config, exchange);
  } catch (const StatusError&) {
    throw;                                // in an exchange all ranks have learned it
  } catch (const std::exception& error) { // such as a lack of memory, between two exchanges
    exchange.tell_peers(status_error_of(error));
    throw;
  }
}

std::unique_ptr<Group> Group::create(const epx_bootstrap& bootstrap, const epx_group_config& config,
                                     BootstrapExchange& exchange) {
  const std::vector<RankHello> world = exchange.step("hellos", [&] { return say_hello(config, exchange); });
  log::group().info("all {} ranks have come", world.size());
  const std::vector<int> members = members_of(world, config.color);
  const auto self = std::ranges::find(members, bootstrap.rank);
  const auto rank = static_cast<int>(self - members.begin());
  exchange.set_members(members);

  const bool some_want_auto =
      std::ranges::any_of(world, [](const RankHello& hello) { return hello.config.transport == EPX_TRANSPORT_AUTO; });
  const TransportChoice choice =
      exchange.step("choice of a transport", [&] { return choose_transport(config.transport, some_want_auto, exchange); });
  const GroupShape shape = exchange.step("nodes", [&] {
    return find_nodes(resolve(config, static_cast<int>(members.size())), config, choice.transport, exchange);
  });
  std::unique_ptr<ControlConnection> control =
      exchange.step("control connection", [&] { return connect_control(shape, rank, config.timeout_ms, exchange); });
  GroupTransport transport =
      exchange.step("transport", [&] { return open_transport(choice.transport, shape, rank, config, exchange); });

  const GroupContext context{.transport = choice.transport,
                             .shape = shape,
                             .layout = transport.layout,
                             .group_id = world[static_cast<size_t>(members.front())].proposed_group_id,
                             .rank = rank,
                             .overflow = config.overflow,
                             .timeout_ms = config.timeout_ms,
                             .checks_handle_mem = environment().check_handle_mem.value_or(false),
                             .has_ordered_calls = false,
                             .forwards_staged_rows = false,
                             .window_access = transport.of.node->window_access()};
  std::unique_ptr<Group> group = exchange.step("backend", [&] {
    return std::unique_ptr<Group>(new Group(context, [&](const GroupContext& of_group) {
      return make_backend(of_group, config.num_comm_sms, std::move(transport), std::move(control), exchange);
    }));
  });
  exchange.stand_by(); // a rank whose memory has ended since the last exchange says so here
  log::group().info(
      "group {:016x}: rank {} of {}, {} ranks per node, transport {} ({}), window {} bytes, receive capacity {} rows",
      context.group_id, context.rank, shape.num_ranks, shape.ranks_per_node, name_of(context.transport), choice.why,
      context.layout.total_bytes, shape.max_recv_tokens);
  return group;
}

} // namespace epx
