// SPDX-License-Identifier: Apache-2.0
// The tokens that go from one node to another: their lists at home and at the relay, and the tables that tell the relay of
// them. See multi_node_prepare.cu.
#pragma once

#include "runtime/nodes/multi_node_prepare_params.h"
#include "runtime/stages/cuda/prepare/prepare_context.cuh"

namespace epx::cuda {

// The kept routes of one token to one node.
struct NodeRoutes {
  RankMask ranks; // by index in the node
  int num_routes = 0;

  __device__ void add(int rank) {
    ranks.set(rank);
    ++num_routes;
  }
  // Returns how many rows come home of a token that has been listed. In EPX_COMBINE_NODE that is one, of the own node also if
  // the token has no routes there, since row j is of token j.
  __device__ int32_t back_rows(epx_combine_precision precision) const {
    if (precision == EPX_COMBINE_NODE) return 1;
    return precision == EPX_COMBINE_EXACT ? num_routes : ranks.count();
  }
};

// ---- Sums over the threads of a block ----

// Numbers of tokens and of their back rows, which are summed together.
struct TokensAndRows {
  int32_t tokens, rows;

  __device__ TokensAndRows operator+(const TokensAndRows& other) const {
    return {tokens + other.tokens, rows + other.rows};
  }
};
struct BlockSums {
  TokensAndRows before; // of the threads before this one
  TokensAndRows all;
};
// All threads of the block call this.
__device__ __forceinline__ BlockSums sums_of_block(TokensAndRows value) {
  __shared__ TokensAndRows of_warps[kWarps];
  TokensAndRows sum = value; // of the lanes up to this one
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const TokensAndRows left{__shfl_up_sync(~0u, sum.tokens, distance), __shfl_up_sync(~0u, sum.rows, distance)};
    if (lane() >= distance) sum = sum + left;
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads(); // every thread has read of_warps in the call before
  if (lane() == kWarp - 1) of_warps[warp] = sum;
  __syncthreads();
  BlockSums sums{{sum.tokens - value.tokens, sum.rows - value.rows}, {0, 0}};
#pragma unroll 1
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) sums.before = sums.before + of_warps[w];
    sums.all = sums.all + of_warps[w];
  }
  return sums;
}

// The threads of the block store `value` at values[begin] up to values[end - 1].
__device__ __forceinline__ void fill_by_block(int32_t* values, int64_t begin, int64_t end, int32_t value) {
#pragma unroll 1
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads)
    values[i] = value;
}

// ---- Before routes are counted ----

// Where each rank sends a fixed number of tokens to a node, block m finds the first token beyond them.
__device__ __forceinline__ void find_token_ends(const MultiNodePrepareParams& params) {
  const MultiNodeShape& shape = params.nodes.shape;
  const PrepareCall& call = params.call;
  const int node = static_cast<int>(blockIdx.x);
  const ExpertBlocks experts = params.experts();
  const int first_expert = experts.first_expert(node * shape.ranks_per_node());
  const int end_of_experts = experts.first_expert((node + 1) * shape.ranks_per_node());
  int32_t* const token_end = params.buffers.token_ends + node;
  if (threadIdx.x == 0) *token_end = static_cast<int32_t>(call.num_tokens);
  if (node == shape.own_node) return;
  TokensAndRows counted{0, 0};
#pragma unroll 1
  for (int64_t tile = 0; tile < call.num_tokens; tile += kThreads) {
    const int64_t token = tile + threadIdx.x;
    bool goes = false;
    if (token < call.num_tokens)
#pragma unroll 1
      for (int k = 0; k < call.top_k; ++k) {
        const int64_t index = index_at(call, token * call.top_k + k);
        goes |= index >= first_expert && index < end_of_experts;
      }
    const BlockSums sums = sums_of_block({goes ? 1 : 0, 0}); // has a barrier, behind which one thread writes the end
    if (goes && counted.tokens + sums.before.tokens == shape.max_rail_tokens()) *token_end = static_cast<int32_t>(token);
    counted = counted + sums.all;
  }
}

// ---- At home ----

// Returns a route of this rank as the ranks of `node` see it: its rank is the index in the node. Slot -1: it does not go there.
__device__ __forceinline__ Route home_route_to(const MultiNodePrepareParams& params, int node, int64_t route) {
  const Route found = params.plan().home_routes[route];
  const int index = found.rank - node * params.nodes.shape.ranks_per_node();
  return found.slot >= 0 && index >= 0 && index < params.nodes.shape.ranks_per_node() ? Route{found.slot, index, 0}
                                                                                      : Route{-1, -1, 0};
}

__device__ __forceinline__ void store_table(const MultiNodePrepareParams& params, int node, int32_t count) {
  const int top_k = params.call.top_k;
  const MultiNodeHandleWriter plan = params.plan();
  int32_t* const table = params.buffers.sent_tables + node * table_words(params.nodes.shape);
  if (threadIdx.x < kTableHeaderWords) table[threadIdx.x] = threadIdx.x == 0 ? count : 0;
  const int places = 1 + top_k; // the token, and each k
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < int64_t{count} * places; i += kThreads) {
    const int64_t j = i / places;
    const int place = static_cast<int>(i % places);
    int32_t* const row = table + kTableHeaderWords + j * (1 + 2 * int64_t{top_k});
    const int64_t token = plan.sent_tokens(node)[j];
    if (place == 0) {
      row[0] = static_cast<int32_t>(token);
      continue;
    }
    const Route route = home_route_to(params, node, token * top_k + place - 1);
    row[2 * place - 1] = route.slot;
    row[2 * place] = route.rank;
  }
}

// Block m lists the tokens that go to node m. Those of the own node are all tokens, in place.
__device__ __forceinline__ void list_tokens(const MultiNodePrepareParams& params) {
  const MultiNodeShape& shape = params.nodes.shape;
  const MultiNodeHandleWriter plan = params.plan();
  const int node = static_cast<int>(blockIdx.x);
  const bool is_own = node == shape.own_node;
  const int top_k = params.call.top_k;
  TokensAndRows listed{0, 0};
#pragma unroll 1
  for (int64_t tile = 0; tile < shape.padded_tokens(); tile += kThreads) {
    const int64_t token = tile + threadIdx.x;
    NodeRoutes routes;
    if (token < params.call.num_tokens)
#pragma unroll 1
      for (int k = 0; k < top_k; ++k)
        if (const Route route = home_route_to(params, node, token * top_k + k); route.slot >= 0) routes.add(route.rank);
    const bool is_listed = is_own ? token < params.call.num_tokens : routes.num_routes > 0;
    const BlockSums sums =
        sums_of_block(is_listed ? TokensAndRows{1, routes.back_rows(shape.group.precision)} : TokensAndRows{0, 0});
    const TokensAndRows before = listed + sums.before;
    if (is_listed) {
      plan.sent_tokens(node)[before.tokens] = static_cast<int32_t>(token);
      plan.home_back_rows(node)[before.tokens] = before.rows;
    }
    if (token < shape.padded_tokens()) plan.positions(node)[token] = routes.num_routes > 0 ? before.tokens : -1;
    listed = listed + sums.all;
  }
  fill_by_block(plan.sent_tokens(node), listed.tokens, shape.padded_tokens(), -1);
  fill_by_block(plan.home_back_rows(node), listed.tokens, shape.padded_tokens() + 1, listed.rows);
  if (threadIdx.x == 0) plan.sent_counts[node] = listed.tokens;
  if (is_own) return;
  __syncthreads(); // sent_tokens is complete
  store_table(params, node, listed.tokens);
}

// ---- At the relay ----

// What a rail peer has stored in its table may be anything. A row whose token is none of its tokens has no routes.
__device__ __forceinline__ int32_t relayed_tokens(const MultiNodePrepareParams& params, const int32_t* table) {
  return max(0, min(table[0], params.nodes.shape.group.max_tokens_per_rank));
}
__device__ __forceinline__ int32_t token_of_row(const int32_t* table, int top_k, int64_t row) {
  return table[kTableHeaderWords + row * (1 + 2 * int64_t{top_k})];
}
__device__ __forceinline__ Route route_of_row(const MultiNodePrepareParams& params, const int32_t* table, int64_t row,
                                              int k) {
  const GroupShape& group = params.nodes.shape.group;
  const int32_t token = token_of_row(table, params.call.top_k, row);
  const int32_t* const words = table + kTableHeaderWords + row * (1 + 2 * int64_t{params.call.top_k}) + 1 + 2 * int64_t{k};
  const bool is_sound = token >= 0 && token < group.max_tokens_per_rank && words[0] >= 0 &&
                        words[0] < group.max_recv_tokens && words[1] >= 0 && words[1] < group.ranks_per_node;
  return is_sound ? Route{words[0], words[1], 0} : Route{-1, -1, 0};
}

// Block m makes the plans of the legs of node m, from its table; those of the own node come from the home routes.
__device__ __forceinline__ void list_relayed(const MultiNodePrepareParams& params) {
  const MultiNodeShape& shape = params.nodes.shape;
  const MultiNodeHandleWriter plan = params.plan();
  const int node = static_cast<int>(blockIdx.x);
  const bool is_own = node == shape.own_node;
  const int top_k = params.call.top_k;
  const int32_t* const table = params.buffers.received_tables + node * table_words(shape);
  const int32_t count = is_own ? static_cast<int32_t>(params.call.num_tokens) : relayed_tokens(params, table);
  TokensAndRows listed{0, 0};
#pragma unroll 1
  for (int64_t tile = 0; tile < shape.padded_tokens(); tile += kThreads) {
    const int64_t row = tile + threadIdx.x;
    Route* const leg_routes = plan.leg_routes + (node * shape.padded_tokens() + row) * top_k;
    NodeRoutes routes;
    if (row < shape.padded_tokens()) {
#pragma unroll 1
      for (int k = 0; k < top_k; ++k) {
        Route route{-1, -1, 0};
        if (row < count)
          route = is_own ? home_route_to(params, node, row * top_k + k) : route_of_row(params, table, row, k);
        leg_routes[k] = route;
        if (route.slot >= 0) routes.add(route.rank);
      }
#pragma unroll 1
      for (int k = 0; k < top_k; ++k)
        if (leg_routes[k].slot >= 0) leg_routes[k].rank_ordinal = routes.ranks.count_below(leg_routes[k].rank);
    }
    const BlockSums sums =
        sums_of_block(row < count ? TokensAndRows{1, routes.back_rows(shape.group.precision)} : TokensAndRows{0, 0});
    if (row < count) plan.relay_back_rows(node)[row] = listed.rows + sums.before.rows;
    listed = listed + sums.all;
  }
  fill_by_block(plan.relay_back_rows(node), count, shape.padded_tokens() + 1, listed.rows);
  if (threadIdx.x == 0) plan.relay_counts[node] = count;
}

} // namespace epx::cuda
