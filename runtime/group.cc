// SPDX-License-Identifier: Apache-2.0
#include "runtime/group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/names.h"
#include "base/random.h"
#include "runtime/layout/multi_node_shape.h"
#include "runtime/layout/planner.h"
#include "runtime/stages/host/host_backend.h"
#include "runtime/struct_size.h"
#if defined(EPX_WITH_CUDA)
#include "runtime/nodes/multi_node_backend.h"
#include "runtime/stages/cuda/cuda_backend.h"
#include "transport/nccl/gpu_fabric.h"
#include "transport/nccl/gpu_identity.h"
#include "transport/nccl/nccl_transport.h"
#endif
#include "runtime/layout/slots.h"
#include "transport/bootstrap/bootstrap_exchange.h"
#include "transport/control/control_connection.h"
#include "transport/control/control_join.h"
#include "transport/host/host_transport.h"
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

// Groups of several nodes share no memory in which a rank's death would show. The call is collective.
std::unique_ptr<ControlConnection> make_control(const GroupContext& context, Exchange& exchange) {
  if (context.shape.num_nodes() > 1)
    return std::make_unique<ControlConnection>(context.rank, context.shape.num_ranks,
                                               std::chrono::milliseconds(context.timeout_ms), exchange);
  stand_by(exchange);
  return nullptr;
}

// Makes the exchanges by which groups of several nodes agree on the SMs of their rails, open those, and make the buffers of
// them, in a group of one node of the same bootstrap.
void stand_by_for_rails(Exchange& exchange) {
  for (int i = 0; i < 3; ++i)
    exchange.all_gather([] { return int32_t{0}; });
}

struct TransportChoice {
  epx_transport transport; // never AUTO
  std::string why;
};

#if defined(EPX_WITH_CUDA)

// On transport host this makes no call of CUDA.
RankPlace find_place(epx_transport transport) {
  RankPlace place = this_rank_place();
  if (transport == EPX_TRANSPORT_NCCL) place.fabric = find_gpu_fabric();
  return place;
}

// Each rank tells what it has before a transport is chosen. NCCL is not loaded on a rank without a GPU.
struct RankDevice {
  GpuIdentity gpu = find_gpu();
  bool has_nccl = gpu.device >= 0 && why_no_nccl().empty();
};

// The call is collective. `auto` becomes nccl when each rank has an NCCL that epx can use, and a GPU that is new enough for the
// kernels and that no other rank of its host has.
TransportChoice choose_transport(epx_transport wanted, Exchange& exchange) {
  if (wanted != EPX_TRANSPORT_AUTO) return {wanted, "as configured"};
  const std::vector<RankDevice> devices = exchange.all_gather([] { return RankDevice(); });
  std::vector<GpuIdentity> gpus(devices.size());
  std::ranges::transform(devices, gpus.begin(), &RankDevice::gpu);
  if (const std::string why = why_not_a_gpu_each(gpus); !why.empty()) return {EPX_TRANSPORT_HOST, "auto: " + why};
  if (const std::string why = why_not_new_enough(gpus); !why.empty()) return {EPX_TRANSPORT_HOST, "auto: " + why};
  if (const auto without = std::ranges::find(devices, false, &RankDevice::has_nccl); without != devices.end())
    return {EPX_TRANSPORT_HOST,
            fmt::format("auto: rank {} has no NCCL that epx can use; here: {}", without - devices.begin(), why_no_nccl())};
  return {EPX_TRANSPORT_NCCL, "auto: each rank has a GPU"};
}

// The call is collective: returns the least of what the ranks' calls of `value` return.
template <typename Value>
int least_of_ranks(Exchange& exchange, const Value& value) {
  const std::vector<int32_t> all = exchange.all_gather([&] { return int32_t{value()}; });
  return *std::ranges::min_element(all);
}

// The call is collective: ranks may have different num_comm_sms, and NCCL needs the same number of CTAs on both ends of a
// transfer.
int agree_on_rail_ctas(int num_comm_sms, Exchange& exchange) {
  return least_of_ranks(exchange, [&] {
    if (num_comm_sms == 1)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "epx_group_config.num_comm_sms is {}; a group of several nodes needs at least 2, one of them for "
           "transfers, or 0 for the default",
           num_comm_sms);
    const int num_sms = cuda::resolve_num_sms(num_comm_sms);
    if (rail_ctas(num_sms) == 0)
      fail(EPX_ERROR_UNSUPPORTED,
           "a group of several nodes needs at least 2 SMs, one of them for transfers; with epx_group_config.num_comm_sms = "
           "{} it may use {} of this GPU",
           num_comm_sms, num_sms);
    return rail_ctas(num_sms);
  });
}

// The call is collective. It also fills in what the transport decides of the context, which must outlive the backend.
std::unique_ptr<Backend> make_backend(GroupContext& context, const epx_group_config& config,
                                      std::unique_ptr<ControlConnection> control, Exchange& exchange) {
  const auto choose_layout = [&](const Transport& transport, const GroupShape& shape_of_window) {
    context.window_access = transport.window_access();
    context.layout = make_window_layout(shape_of_window, context.window_access);
    if (context.window_access == WindowAccess::by_kernels && !transport.keeps_lines_whole())
      limit_ll_tokens(context.layout, shape_of_window.num_ranks, 0); // rows travel in such lines on the low-latency path
  };
  if (context.transport == EPX_TRANSPORT_NCCL && context.shape.num_nodes() > 1) {
    const int rail_ctas = agree_on_rail_ctas(config.num_comm_sms, exchange);
    MultiNodeTransport transport = make_nccl_multi_node_transport(
        context.rank, context.shape.num_ranks, context.shape.ranks_per_node, rail_ctas, context.timeout_ms, exchange);
    choose_layout(*transport.node,
                  make_multi_node_shape(context.shape, 0).node); // no node has more experts than that of rank 0
    return cuda::make_multi_node_backend(context, config.num_comm_sms, rail_ctas, std::move(transport), std::move(control),
                                         exchange);
  }
  if (context.transport == EPX_TRANSPORT_NCCL) {
    std::unique_ptr<Transport> transport =
        make_nccl_transport(context.rank, context.shape.num_ranks, context.timeout_ms, exchange);
    choose_layout(*transport, context.shape);
    // All ranks must take the same path although their num_comm_sms may differ, so the smallest number of SMs decides.
    limit_ll_tokens(context.layout, context.shape.num_ranks,
                    least_of_ranks(exchange, [&] { return cuda::resolve_num_sms(config.num_comm_sms); }));
    return cuda::make_backend(context, config.num_comm_sms, std::move(transport), exchange);
  }
  std::unique_ptr<Transport> transport = make_host_transport(context.rank, context.shape.num_ranks);
  choose_layout(*transport, context.shape);
  return host::make_backend(context, std::move(transport), std::move(control), exchange);
}

#else

RankPlace find_place(epx_transport) {
  return this_rank_place();
}

TransportChoice choose_transport(epx_transport wanted, Exchange&) {
  return {EPX_TRANSPORT_HOST, wanted == EPX_TRANSPORT_AUTO ? "auto: this build has no other" : "as configured"};
}

std::unique_ptr<Backend> make_backend(GroupContext& context, const epx_group_config&,
                                      std::unique_ptr<ControlConnection> control, Exchange& exchange) {
  std::unique_ptr<Transport> transport = make_host_transport(context.rank, context.shape.num_ranks);
  context.window_access = transport->window_access();
  context.layout = make_window_layout(context.shape, context.window_access);
  return host::make_backend(context, std::move(transport), std::move(control), exchange);
}

#endif

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
  const std::vector<RankHello> world = exchange.all_gather([&] {
    validate(config);
    require_environment();
    require_not_interrupted("epx_group_create");
    return RankHello{kLibraryVersion, config, random_u64()};
  });
  require_consistent(world);
  log::group().info("all {} ranks have come", world.size());

  const std::vector<int> members = members_of(world, config.color);
  const auto self = std::find(members.begin(), members.end(), bootstrap.rank);
  exchange.set_members(members);
  GroupContext context{};
  context.shape = resolve(config, static_cast<int>(members.size()));
  context.group_id = world[static_cast<size_t>(members.front())].proposed_group_id;
  context.rank = static_cast<int>(self - members.begin());
  context.overflow = config.overflow;
  context.timeout_ms = config.timeout_ms;
  context.checks_handle_mem = environment().check_handle_mem.value_or(false);

  const TransportChoice choice = choose_transport(config.transport, exchange);
  context.transport = choice.transport;
  const std::vector<RankPlace> places = exchange.all_gather([&] { return find_place(choice.transport); });
  // A group without the nodes that it needs fails all ranks of the bootstrap.
  const bool all_have_one_node = exchange.all_of([&] {
    context.shape.ranks_per_node = resolve_ranks_per_node(context.shape, config, choice.transport, places);
    return context.shape.num_nodes() == 1;
  });
  std::unique_ptr<ControlConnection> control;
  if (!all_have_one_node) control = make_control(context, exchange);
  std::unique_ptr<Group> group(new Group(context));
  group->backend_ = make_backend(group->context_, config, std::move(control), exchange);
  if (!all_have_one_node && context.transport == EPX_TRANSPORT_NCCL && context.shape.num_nodes() == 1)
    stand_by_for_rails(exchange);
  exchange.all_gather([] { return int32_t{0}; }); // a rank whose memory has ended since the last exchange says so here
  log::group().info(
      "group {:016x}: rank {} of {}, {} ranks per node, transport {} ({}), window {} bytes, receive capacity {} rows",
      context.group_id, context.rank, context.shape.num_ranks, context.shape.ranks_per_node, name_of(context.transport),
      choice.why, group->context_.layout.total_bytes, context.shape.max_recv_tokens);
  return group;
}

} // namespace epx
