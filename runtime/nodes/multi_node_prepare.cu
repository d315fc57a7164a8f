// SPDX-License-Identifier: Apache-2.0
// The kernels of prepare in a group of several nodes. Counts of all ranks, and a table for each rail peer, travel by rail; the
// slot records and first slots of each leg then travel in windows, as one call of the node.
//
//   count_routes   find_token_ends  Only with fixed_rail_tokens: block m finds the first token too many for node m. Routes to
//                                   that node from this token on are dropped: they are counted as such, by expert.
//                  count_part    Each block counts the routes of its part of this rank's tokens, by expert.
//                  add_parts     An exclusive prefix sum over the parts' counts of each expert; its total is this rank's count.
//   assign_slots   find_zones    From the counts of all ranks: zones, totals, the header, and the first slot of this rank's
//                                routes to each expert, which is behind those of the ranks before.
//                  assign_slots  The routes of each part get their slots, in order, behind those of the parts before.
//   list_tokens                  Block m lists the tokens that go to node m, and fills the table of the rail peer there. In the
//                                blocks behind those slots become pads, until deliver_leg brings their records.
//   list_relayed                 Block m makes the plans of the legs of node m from the table that has come from there.
//   deliver_leg                  Each rank stores the slot records and first slots of the tokens that it stands for.
//
//   kernel        warps        what they wait for
//   deliver_leg   all          entry barrier of the node; LL packets of first slots and slot records
//   the others    all          nothing: what a kernel reads, the kernels and transfers before it on the stream have written
//
// These kernels take microseconds beside transfers between nodes that take tens of them, so they keep their counters in device
// memory instead of shared memory, which would limit the number of experts of the whole group.
#include "runtime/nodes/multi_node_kernels.h"

#include "base/device/launch.h"
#include "runtime/nodes/deliver_leg.cuh"
#include "runtime/nodes/multi_node_slots.cuh"
#include "runtime/nodes/node_tokens.cuh"
#include "runtime/stages/call_descriptor.h"

namespace epx::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) find_token_ends_kernel(const __grid_constant__ MultiNodePrepareParams params) {
  find_token_ends(params);
}
__global__ void __launch_bounds__(kThreads) count_part_kernel(const __grid_constant__ MultiNodePrepareParams params) {
  count_part(params);
}
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const __grid_constant__ MultiNodePrepareParams params) {
  add_parts(params);
}
__global__ void __launch_bounds__(kThreads) find_zones_kernel(const __grid_constant__ MultiNodePrepareParams params) {
  find_zones(params);
}
__global__ void __launch_bounds__(kWarp) assign_slots_kernel(const __grid_constant__ MultiNodePrepareParams params) {
  assign_slots(params);
}
// The first blocks list the tokens of a node each. The others fill outputs meanwhile.
__global__ void __launch_bounds__(kThreads) list_tokens_kernel(const __grid_constant__ MultiNodePrepareParams params) {
  const int nodes = params.nodes.shape.num_nodes();
  if (const int block = static_cast<int>(blockIdx.x); block < nodes)
    list_tokens(params);
  else
    fill_outputs(params, block - nodes, static_cast<int>(gridDim.x) - nodes);
}
__global__ void __launch_bounds__(kThreads) list_relayed_kernel(const __grid_constant__ MultiNodePrepareParams params) {
  list_relayed(params);
}
__global__ void __launch_bounds__(kThreads) deliver_leg_kernel(const __grid_constant__ DeliverLegParams params) {
  deliver_leg(params);
  leave(params.group);
}

constexpr int kMaxFillBlocks = 32;
constexpr int kMaxDeliverBlocks = 16;

// Returns the number of blocks with one item for each thread, but at least 1 and at most `max_blocks`.
int blocks_for(int64_t items, int64_t max_blocks) {
  return static_cast<int>(std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, max_blocks));
}

} // namespace

std::vector<const void*> multi_node_prepare_kernels() {
  return {reinterpret_cast<const void*>(&find_token_ends_kernel), reinterpret_cast<const void*>(&count_part_kernel),
          reinterpret_cast<const void*>(&add_parts_kernel),       reinterpret_cast<const void*>(&find_zones_kernel),
          reinterpret_cast<const void*>(&assign_slots_kernel),    reinterpret_cast<const void*>(&list_tokens_kernel),
          reinterpret_cast<const void*>(&list_relayed_kernel),    reinterpret_cast<const void*>(&deliver_leg_kernel)};
}

cudaError_t launch_count_routes(const MultiNodePrepareParams& params, cudaStream_t stream) {
  MultiNodePrepareTotals* const totals = params.buffers.totals;
  if (const cudaError_t error = cudaMemsetAsync(totals, 0, sizeof(*totals), stream); error != cudaSuccess) return error;
  const GroupShape& group = params.nodes.shape.group;
  if (may_drop_beyond_rails(group))
    if (const cudaError_t error = cudaMemsetAsync(params.buffers.counts + beyond_rails_word(group), 0,
                                                  static_cast<size_t>(group.num_experts) * sizeof(int32_t), stream);
        error != cudaSuccess)
      return error;
  if (params.limits_rail_tokens())
    if (const cudaError_t error =
            launch(&find_token_ends_kernel, {params.nodes.shape.num_nodes(), kThreads}, stream, params);
        error != cudaSuccess)
      return error;
  if (const cudaError_t error = launch(&count_part_kernel, {params.num_parts, kThreads}, stream, params);
      error != cudaSuccess)
    return error;
  const int blocks = (params.nodes.shape.group.num_experts + kWarps - 1) / kWarps;
  return launch(&add_parts_kernel, {blocks, kThreads}, stream, params);
}

cudaError_t launch_assign_slots(const MultiNodePrepareParams& params, cudaStream_t stream) {
  if (const cudaError_t error = launch(&find_zones_kernel, {1, kThreads}, stream, params); error != cudaSuccess)
    return error;
  return launch(&assign_slots_kernel, {params.num_parts, kWarp}, stream, params);
}

cudaError_t launch_list_tokens(const MultiNodePrepareParams& params, cudaStream_t stream) {
  const MultiNodeShape& shape = params.nodes.shape;
  const int fill_blocks = blocks_for(shape.group.max_recv_tokens, kMaxFillBlocks);
  return launch(&list_tokens_kernel, {shape.num_nodes() + fill_blocks, kThreads}, stream, params);
}

cudaError_t launch_list_relayed(const MultiNodePrepareParams& params, cudaStream_t stream) {
  return launch(&list_relayed_kernel, {params.nodes.shape.num_nodes(), kThreads}, stream, params);
}

cudaError_t launch_deliver_leg(const DeviceGroup& group, const MultiNodePrepareParams& prepare, int leg, int num_sms,
                               cudaStream_t stream) {
  const MultiNodeShape& shape = prepare.nodes.shape;
  const PrepareCall& call = prepare.call;
  const DeliverLegParams params{group,
                                prepare,
                                leg_layout(prepare.layout, shape, call.top_k, leg),
                                describe(call, prepare.operation),
                                leg / shape.num_chunks(),
                                leg % shape.num_chunks(),
                                leg == shape.leg(shape.own_node, 0)};
  const int64_t packets = int64_t{shape.chunk_tokens()} * std::max(shape.ranks_per_node(), call.top_k);
  const int blocks = blocks_for(packets, std::min(num_sms, kMaxDeliverBlocks));
  return launch_cooperative(&deliver_leg_kernel, {blocks, kThreads}, stream, params);
}

} // namespace epx::cuda
