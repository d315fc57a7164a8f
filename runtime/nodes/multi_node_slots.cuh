// SPDX-License-Identifier: Apache-2.0
// The slots of this rank's routes, from the counts of all ranks of the group. See multi_node_prepare.cu.
#pragma once

#include "runtime/nodes/disagreement.cuh"
#include "runtime/nodes/multi_node_prepare_params.h"
#include "runtime/stages/cuda/prepare/slot_assignment.cuh"

namespace epx::cuda {

// ---- Counts ----

// Returns whether a route is dropped because its token is beyond those that travel to the expert's node.
__device__ __forceinline__ bool is_beyond_rails(const MultiNodePrepareParams& params, int64_t route, int64_t expert) {
  const MultiNodeShape& shape = params.nodes.shape;
  if (!params.limits_rail_tokens()) return false;
  const int node = shape.group.node_of(params.experts().rank_of(static_cast<int>(expert)));
  return route / params.call.top_k >= params.buffers.token_ends[node];
}

// A block counts the routes of its part of the tokens by expert.
__device__ __forceinline__ void count_part(const MultiNodePrepareParams& params) {
  const PrepareCall& call = params.call;
  const int num_experts = params.nodes.shape.group.num_experts;
  int32_t* const counts = params.part_counts(static_cast<int>(blockIdx.x));
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kThreads)
    counts[e] = 0;
  __syncthreads();
  const TokenRange tokens = partition_tokens(call.num_tokens, gridDim.x);
#pragma unroll 1
  for (int64_t route = int64_t{tokens.begin} * call.top_k + threadIdx.x; route < int64_t{tokens.end} * call.top_k;
       route += kThreads) {
    const int64_t index = index_at(call, route);
    if (index >= 0 && index < num_experts) {
      if (is_beyond_rails(params, route, index)) {
        atomicAdd(&params.buffers.totals->beyond_rails, 1ull);
        atomicAdd(&params.buffers.counts[beyond_rails_word(params.nodes.shape.group) + index], 1);
      } else
        atomicAdd(&counts[index], 1);
    } else if (index != -1) {
      atomicAdd(&params.buffers.totals->bad_indices, 1ull);
      atomicMax(&params.buffers.totals->first_bad_inverted, ~static_cast<unsigned long long>(route));
    }
  }
}

// Each warp replaces one expert's counts of all parts by their exclusive prefix sum, and stores the total in `counts`. One
// thread writes this rank's AgreedFields behind the totals.
__device__ __forceinline__ void add_parts(const MultiNodePrepareParams& params) {
  if (blockIdx.x == 0 && threadIdx.x == 0)
    store_agreed_fields(params.buffers.counts + params.nodes.shape.group.num_experts,
                        {.operation = params.operation,
                         .top_k = params.call.top_k,
                         .alignment = params.call.alignment,
                         .zone_stride = static_cast<int32_t>(params.call.zone_stride)});
  const int e = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kWarp);
  if (e >= params.nodes.shape.group.num_experts) return;
  int32_t total = 0;
#pragma unroll 1
  for (int begin = 0; begin < params.num_parts; begin += kWarp) {
    const int part = begin + lane();
    const int32_t count = part < params.num_parts ? params.part_counts(part)[e] : 0;
    const int32_t sum = inclusive_sum(count);
    if (part < params.num_parts) params.part_counts(part)[e] = total + sum - count;
    total += from_lane(sum, kWarp - 1);
  }
  if (lane() == 0) params.buffers.counts[e] = total;
}

// ---- Zones ----

__device__ __forceinline__ int64_t inclusive_sum_of_lanes(int64_t value) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t left = __shfl_up_sync(~0u, value, distance);
    if (lane() >= distance) value += left;
  }
  return value;
}

// Routes to an expert. The counts of peers may be anything, so each is clamped to what a rank can have; a sum of them is below
// 2^47.
struct ExpertDemand {
  int64_t all;
  int64_t of_earlier_ranks; // than this one
};
__device__ __forceinline__ ExpertDemand demand_of(const MultiNodePrepareParams& params, int expert) {
  const GroupShape& group = params.nodes.shape.group;
  const int64_t max_routes = int64_t{group.max_tokens_per_rank} * params.call.top_k;
  ExpertDemand demand{0, 0};
#pragma unroll 4
  for (int source = 0; source < group.num_ranks; ++source) {
    const int64_t count = params.counts_of(source)[expert];
    const int64_t routes = count < 0 ? 0 : min(count, max_routes);
    demand.all += routes;
    if (source < params.nodes.shape.rank) demand.of_earlier_ranks += routes;
  }
  return demand;
}

// In shared memory: the sums over this rank's experts, and dropped_of_mine, which counts this rank's routes that are dropped at
// any expert of the group.
struct ZoneSums {
  unsigned long long demand, kept, rows_needed, dropped_of_mine;
};

// One warp finds the zones of the experts of `rank` and the first slots there of this rank's routes, and, where the rank is
// this one, writes its zones and counts.
__device__ __forceinline__ void find_zones_of_rank(const MultiNodePrepareParams& params, int rank, ZoneSums& sums) {
  const PrepareCall& call = params.call;
  const MultiNodeHandleWriter plan = params.plan();
  const ExpertBlocks experts = params.experts();
  const ZoneRule zones = params.zones();
  const bool is_own = rank == params.nodes.shape.rank;
  const int first_expert = experts.first_expert(rank);
  int64_t before = 0; // the rows of the zones before
#pragma unroll 1
  for (int first = first_expert; first < experts.first_expert(rank + 1); first += kWarp) {
    const int e = first + lane();
    const bool is_expert = e < experts.first_expert(rank + 1);
    const ExpertDemand demand = is_expert ? demand_of(params, e) : ExpertDemand{0, 0};
    const int64_t rows = is_expert ? zones.rows(demand.all) : 0;
    const int64_t end = before + inclusive_sum_of_lanes(rows);
    before = from_lane(end, kWarp - 1);
    if (!is_expert) continue;

    const int64_t zone = end - rows;
    const int64_t first_slot = min(zone + demand.of_earlier_ranks, zones.usable); // of this rank's routes
    const int64_t routes = params.buffers.counts[e];
    atomicAdd(&sums.dropped_of_mine, static_cast<unsigned long long>(routes - zones.kept(zone, first_slot, routes)));
    params.buffers.counts[e] = static_cast<int32_t>(first_slot);
    if (!is_own) continue;
    const int64_t begin = min(zone, zones.usable);
    const int64_t kept = zones.kept(zone, begin, demand.all);
    atomicAdd(&sums.demand, static_cast<unsigned long long>(demand.all));
    atomicAdd(&sums.kept, static_cast<unsigned long long>(kept));
    const int local = e - first_expert;
    plan.zone_begin[local] = static_cast<int32_t>(begin);
    plan.zone_rows[local] = static_cast<int32_t>(kept);
    plan.no_zones[local] = 0;
    store_count(call, call.counts, local, kept);
    store_count(call, call.offsets, local, begin);
  }
  if (is_own && lane() == 0) sums.rows_needed = static_cast<unsigned long long>(before);
}

// One thread writes the header, the end of the zones, and the totals.
__device__ __forceinline__ void deliver_nodes_totals(const MultiNodePrepareParams& params, const ZoneSums& sums) {
  const PrepareCall& call = params.call;
  const MultiNodeHandleWriter plan = params.plan();
  const int num_local = params.experts().num_local_experts(params.nodes.shape.rank);
  const auto demand = static_cast<int64_t>(sums.demand);
  const auto kept = static_cast<int64_t>(sums.kept);
  const auto rows_needed = static_cast<int64_t>(sums.rows_needed);
  HandleHeader header{};
  header.magic = kHandleMagic;
  header.group_id = params.nodes.group_id;
  header.plan_id = params.nodes.state->sequence;
  header.num_tokens = call.num_tokens;
  header.rows_in_use = min(rows_needed, params.zones().usable);
  header.top_k = call.top_k;
  header.alignment = call.alignment;
  header.rank = params.nodes.shape.rank;
  header.ll_tokens = 0;
  header.rows_per_source = kExpertMajor;
  header.checksum = header_checksum(header);
  *plan.header = header;
  plan.zone_begin[num_local] = static_cast<int32_t>(header.rows_in_use);
  plan.no_zones[num_local] = 0;
  store_count(call, call.offsets, num_local, header.rows_in_use);
  params.buffers.totals->demand = demand;
  params.buffers.totals->kept = kept;
  params.buffers.totals->rows_needed = rows_needed;
  if (call.info == nullptr) return;
  call.info[0] = demand;
  call.info[1] = kept;
  call.info[2] = demand - kept;
  call.info[3] = static_cast<int64_t>(sums.dropped_of_mine + params.buffers.totals->beyond_rails);
  call.info[4] = rows_needed;
}

// One thread compares what the ranks of the group must pass alike.
__device__ __forceinline__ void compare_ranks(const MultiNodePrepareParams& params) {
  const GroupShape& group = params.nodes.shape.group;
  const AgreedFields first = load_agreed_fields(params.counts_of(0) + group.num_experts);
#pragma unroll 1
  for (int rank = 1; rank < group.num_ranks; ++rank) {
    const AgreedFields other = load_agreed_fields(params.counts_of(rank) + group.num_experts);
    if (first == other) continue;
    publish_disagreement(params.nodes, {0, first}, {rank, other});
    return;
  }
}

// One block: each warp takes some ranks.
__device__ __forceinline__ void find_zones(const MultiNodePrepareParams& params) {
  __shared__ ZoneSums sums;
  if (threadIdx.x == 0) sums = {0, 0, 0, 0};
  __syncthreads();
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x) / kWarp; rank < params.nodes.shape.group.num_ranks; rank += kWarps)
    find_zones_of_rank(params, rank, sums);
  __syncthreads();
  if (threadIdx.x == 0) deliver_nodes_totals(params, sums);
  if (threadIdx.x == kThreads - 1) compare_ranks(params);
}

// ---- Slots ----

// A block of one warp walks its part of the tokens, 32 routes at a time, and numbers the routes to each expert. The slot of a
// route is its number added to the expert's first slot.
__device__ __forceinline__ void assign_slots(const MultiNodePrepareParams& params) {
  const PrepareCall& call = params.call;
  const MultiNodeHandleWriter plan = params.plan();
  const MultiNodeShape& shape = params.nodes.shape;
  const ExpertBlocks experts = params.experts();
  int32_t* const next = params.part_counts(static_cast<int>(blockIdx.x));
  const TokenRange tokens = partition_tokens(call.num_tokens, gridDim.x);
  const int64_t begin = int64_t{tokens.begin} * call.top_k;
  const int64_t end = int64_t{tokens.end} * call.top_k;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t route = first + lane();
    const int64_t index = route < end ? index_at(call, route) : -1;
    const bool has_slot = index >= 0 && index < shape.group.num_experts && !is_beyond_rails(params, route, index);
    const int expert = has_slot ? static_cast<int>(index) : -1;
    const unsigned same = __match_any_sync(~0u, expert);
    const unsigned before = same & ((1u << lane()) - 1);
    const int32_t number = expert >= 0 ? next[expert] + __popc(before) : 0; // of the route among this rank's to the expert
    __syncwarp(); // the lanes with this expert have read its next number before one of them writes it
    if (expert >= 0 && before == 0) next[expert] = number + __popc(same);
    __syncwarp();
    if (route >= end) continue;
    const int64_t slot = expert >= 0 ? int64_t{params.buffers.counts[expert]} + number : -1;
    const bool is_kept = slot >= 0 && slot < params.end_of_zone(expert);
    const Route found = is_kept ? Route{static_cast<int32_t>(slot), experts.rank_of(expert), 0} : Route{-1, -1, 0};
    plan.home_routes[route] = found;
    if (call.slot != nullptr) call.slot[route] = found.slot;
  }
  __syncwarp();
#pragma unroll 1
  for (int64_t route = begin + lane(); route < end; route += kWarp) {
    const int rank = plan.home_routes[route].rank;
    if (rank < 0) continue;
    const int first_rank = shape.group.node_of(rank) * shape.ranks_per_node();
    const Route* const routes = plan.home_routes + route / call.top_k * call.top_k; // the token's
    RankMask lower_ranks;                                                           // of the node, by index in it
#pragma unroll 1
    for (int k = 0; k < call.top_k; ++k)
      if (const int other = routes[k].rank; other >= first_rank && other < rank) lower_ranks.set(other - first_rank);
    plan.home_routes[route].rank_ordinal = lower_ranks.count();
  }
}

// Returns how many routes a rank has to an expert, before drops; peers' counts may be anything.
__device__ __forceinline__ int64_t global_count(const MultiNodePrepareParams& params, int rank, int expert) {
  const int32_t* const counts = params.counts_of(rank);
  const GroupShape& group = params.nodes.shape.group;
  const int64_t kept = counts[expert];
  return may_drop_beyond_rails(group) ? kept + counts[beyond_rails_word(group) + expert] : kept;
}

// Behind find_zones: slots have no origin yet, those in use have the records of pads, and the counts of all ranks become
// an output.
__device__ __forceinline__ void fill_outputs(const MultiNodePrepareParams& params, int block, int num_blocks) {
  const PrepareCall& call = params.call;
  const MultiNodeHandleWriter plan = params.plan();
  const GroupShape& group = params.nodes.shape.group;
  const int64_t thread = int64_t{block} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{num_blocks} * kThreads;
#pragma unroll 1
  for (int64_t slot = thread; slot < plan.header->rows_in_use; slot += threads)
    plan.slot_records[slot] = kPadRecord;
  if (call.slot_origin != nullptr)
#pragma unroll 1
    for (int64_t i = thread; i < 3 * group.max_recv_tokens; i += threads)
      call.slot_origin[i] = -1;
  if (call.global_counts != nullptr)
#pragma unroll 1
    for (int64_t i = thread; i < int64_t{group.num_ranks} * group.num_experts; i += threads)
      store_count(call, call.global_counts, i,
                  global_count(params, static_cast<int>(i / group.num_experts), static_cast<int>(i % group.num_experts)));
}

} // namespace epx::cuda
