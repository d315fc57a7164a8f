// SPDX-License-Identifier: Apache-2.0
#include "runtime/group_transport.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "runtime/stages/host/host_backend.h"
#include "transport/host/host_transport.h"
#if defined(EPX_WITH_CUDA)
#include "runtime/layout/multi_node_shape.h"
#include "runtime/nodes/multi_node_backend.h"
#include "runtime/stages/cuda/cuda_backend.h"
#include "runtime/stages/cuda/launch_plan.h"
#include "runtime/tuning/tuning.h"
#include "transport/nccl/gpu_fabric.h"
#include "transport/nccl/gpu_identity.h"
#include "transport/nccl/nccl_transport.h"
#endif

namespace epx {
namespace {

GroupTransport open_host_transport(const GroupShape& shape, int rank) {
  std::unique_ptr<Transport> transport = make_host_transport(rank, shape.num_ranks);
  const WindowLayout layout = make_window_layout(shape, transport->window_access());
  return {{std::move(transport), nullptr}, 0, layout};
}

#if defined(EPX_WITH_CUDA)

// Each rank tells what it has before a transport is chosen. NCCL is not loaded on a rank without a GPU.
struct RankDevice {
  GpuIdentity gpu = find_gpu();
  bool has_nccl = gpu.device >= 0 && why_no_nccl().empty();
};

// The call is collective: ranks may have different num_comm_sms, and NCCL needs the same number of CTAs on both ends of a
// transfer.
int agree_on_rail_ctas(int ranks_per_node, int num_comm_sms, Exchange& exchange) {
  const std::vector<int32_t> all = exchange.all_gather([&] {
    if (num_comm_sms == 1)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "epx_group_config.num_comm_sms is {}; a group of several nodes needs at least 2, one of them for "
           "transfers, or 0 for the default",
           num_comm_sms);
    const int num_sms = cuda::LaunchPlan::resolve_num_sms(ranks_per_node, num_comm_sms, 0);
    if (rail_ctas(num_sms) == 0)
      fail(EPX_ERROR_UNSUPPORTED,
           "a group of several nodes needs at least 2 SMs, one of them for transfers; with epx_group_config.num_comm_sms = "
           "{} it may use {} of this GPU",
           num_comm_sms, num_sms);
    return int32_t{rail_ctas(num_sms)};
  });
  return *std::ranges::min_element(all);
}

// The call is collective: all ranks must take the same path although their GPUs and num_comm_sms may differ.
LlLimits agree_on_ll_limits(int num_ranks, int num_comm_sms, Exchange& exchange) {
  const std::vector<LlLimits> all =
      exchange.all_gather([&] { return cuda::LaunchPlan::find_ll_limits(num_ranks, num_comm_sms); });
  LlLimits least = all.front();
  for (const LlLimits& limits : all)
    least = {std::min(least.max_chunks, limits.max_chunks),
             std::min(least.max_gathered_routes, limits.max_gathered_routes)};
  return least;
}

WindowLayout layout_on(const Transport& transport, const GroupShape& shape_of_window) {
  WindowLayout layout = make_window_layout(shape_of_window, transport.window_access());
  if (transport.window_access() == WindowAccess::by_kernels && !transport.keeps_lines_whole())
    limit_ll_path(layout, shape_of_window.num_ranks, // rows travel in such lines on the low-latency path
                  ll_limits(measured_tuning({}, shape_of_window.num_ranks), 0));
  return layout;
}

} // namespace

RankPlace find_place(epx_transport transport) {
  RankPlace place = this_rank_place();
  if (transport == EPX_TRANSPORT_NCCL) place.fabric = find_gpu_fabric();
  return place;
}

TransportChoice choose_transport(epx_transport wanted, bool some_want_auto, Exchange& exchange) {
  if (wanted != EPX_TRANSPORT_AUTO) {
    if (some_want_auto) exchange.all_gather([] { return int32_t{0}; }); // beside the groups that choose
    return {wanted, "as configured"};
  }
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

GroupTransport open_transport(epx_transport kind, const GroupShape& shape, int rank, const epx_group_config& config,
                              Exchange& exchange) {
  if (kind != EPX_TRANSPORT_NCCL) return open_host_transport(shape, rank);
  if (shape.num_nodes() > 1) {
    const int rail_ctas = agree_on_rail_ctas(shape.ranks_per_node, config.num_comm_sms, exchange);
    MultiNodeTransport nodes =
        make_nccl_multi_node_transport(rank, shape.num_ranks, shape.ranks_per_node, rail_ctas, config.timeout_ms, exchange);
    const WindowLayout layout =
        layout_on(*nodes.node, make_multi_node_shape(shape, 0).node); // rank 0's has the most experts
    return {std::move(nodes), rail_ctas, layout};
  }
  std::unique_ptr<Transport> transport = make_nccl_transport(rank, shape.num_ranks, config.timeout_ms, exchange);
  WindowLayout layout = layout_on(*transport, shape);
  limit_ll_path(layout, shape.num_ranks, agree_on_ll_limits(shape.num_ranks, config.num_comm_sms, exchange));
  return {{std::move(transport), nullptr}, 0, layout};
}

std::unique_ptr<Backend> make_backend(const GroupContext& context, int num_comm_sms, GroupTransport transport,
                                      std::unique_ptr<ControlConnection> control, Exchange& exchange) {
  if (context.transport != EPX_TRANSPORT_NCCL)
    return host::make_backend(context, std::move(transport.of.node), std::move(control), exchange);
  if (context.shape.num_nodes() > 1)
    return cuda::make_multi_node_backend(context, num_comm_sms, transport.rail_ctas, std::move(transport.of),
                                         std::move(control), exchange);
  return cuda::make_backend(context, num_comm_sms, std::move(transport.of.node), exchange);
}

#else

} // namespace

RankPlace find_place(epx_transport) {
  return this_rank_place();
}

TransportChoice choose_transport(epx_transport wanted, bool, Exchange&) {
  return {EPX_TRANSPORT_HOST, wanted == EPX_TRANSPORT_AUTO ? "auto: this build has no other" : "as configured"};
}

GroupTransport open_transport(epx_transport, const GroupShape& shape, int rank, const epx_group_config&, Exchange&) {
  return open_host_transport(shape, rank);
}

std::unique_ptr<Backend> make_backend(const GroupContext& context, int, GroupTransport transport,
                                      std::unique_ptr<ControlConnection> control, Exchange& exchange) {
  return host::make_backend(context, std::move(transport.of.node), std::move(control), exchange);
}

#endif

} // namespace epx
