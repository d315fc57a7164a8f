// SPDX-License-Identifier: Apache-2.0
// The row map is a stable counting sort in three kernels: each warp counts the routes of its chunk, one block turns the counts
// into zones and into the first row of each (chunk, expert), and each warp assigns its chunk's rows. A warp goes through its
// chunk in order, 32 routes at a time, and has the row of counts of its chunk to itself, so nothing is atomic and the order
// is that of the routes.
#include <climits>

#include "base/device/kernel_addresses.h"
#include "moe/cuda/report.cuh"
#include "moe/cuda/warps.cuh"
#include "moe/permute/cuda/kernels.h"

namespace epx::moe::cuda {
namespace {

struct Chunk {
  int64_t begin, end;
  int32_t* counts; // [E]

  __device__ Chunk(const RowMapCall& call, int64_t index) {
    const int64_t chunks = num_route_chunks(call.num_routes);
    const int64_t routes = (call.num_routes + chunks - 1) / chunks;
    begin = min(index * routes, call.num_routes);
    end = min(begin + routes, call.num_routes);
    counts = call.chunk_counts + index * call.num_experts;
  }
};

// Calls visit(route, expert, lanes) for each 32 routes of the chunk: `expert` is the lane's, or -1 for none, and `lanes` are
// those that have the same one.
template <typename Visit>
__device__ inline void for_each_route(const RowMapCall& call, const Chunk& chunk, bool reports, const Visit& visit) {
#pragma unroll 1
  for (int64_t first = chunk.begin; first < chunk.end; first += kWarp) {
    const int64_t route = first + lane();
    int expert = -1;
    if (route < chunk.end) {
      const int64_t index = call.topk_idx[route];
      if (index >= 0 && index < call.num_experts)
        expert = static_cast<int>(index);
      else if (index != -1 && reports)
        report(call.errors, EPX_MOE_ERROR_EXPERT, route / call.top_k, route % call.top_k, index, call.num_experts);
    }
    visit(route, expert, __match_any_sync(~0u, expert));
    __syncwarp(); // the counts that a lane has written here may be read by another one in the next round
  }
}

//   warps  what they do                          what they wait for
//   all    count one chunk after the other       nothing
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ RowMapCall call) {
  for_each_item(num_route_chunks(call.num_routes), [&](int64_t index) {
    const Chunk chunk(call, index);
    for (int64_t expert = lane(); expert < call.num_experts; expert += kWarp)
      chunk.counts[expert] = 0;
    __syncwarp();
    for_each_route(call, chunk, true, [&](int64_t, int expert, unsigned lanes) {
      if (expert >= 0 && epx::cuda::lowest_bit(lanes) == lane()) chunk.counts[expert] += __popc(lanes);
    });
  });
}

// The exclusive prefix sum of the threads' values over the block, plus `carry`, which becomes the next block's. All threads
// call this.
__device__ inline int64_t prefix_of_block(int64_t value, int64_t& carry) {
  constexpr int kWarps = kBlockThreads / kWarp;
  __shared__ int64_t sums[kWarps];
  int64_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const auto below = static_cast<int64_t>(__shfl_up_sync(~0u, static_cast<long long>(inclusive), distance));
    if (lane() >= distance) inclusive += below;
  }
  __syncthreads(); // all threads have read the sums of the call before
  if (lane() == kWarp - 1) sums[warp_of_block()] = inclusive;
  __syncthreads();
  int64_t before = carry;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < warp_of_block()) before += sums[warp];
    carry += sums[warp];
  }
  return before + inclusive - value;
}

//   warps  what they do                                                       what they wait for
//   all    each thread adds up the chunks' counts of one expert of a tile     barriers of the block
__global__ void __launch_bounds__(kBlockThreads) zone_kernel(const __grid_constant__ RowMapCall call) {
  const int64_t chunks = num_route_chunks(call.num_routes);
  int64_t rows_needed = 0; // the same in all threads
#pragma unroll 1
  for (int64_t tile = 0; tile < call.num_experts; tile += kBlockThreads) {
    const int64_t expert = tile + threadIdx.x;
    const bool has_expert = expert < call.num_experts;
    int32_t demand = 0;
#pragma unroll 8
    for (int64_t chunk = 0; has_expert && chunk < chunks; ++chunk)
      demand += call.chunk_counts[chunk * call.num_experts + expert];
    const int64_t zone = (demand + call.alignment - 1) / call.alignment * call.alignment;
    const int64_t first = prefix_of_block(zone, rows_needed);
    if (!has_expert) continue;
    call.counts.set(expert, demand);
    call.offsets.set(expert, min(first, int64_t{INT_MAX}));
    int64_t next = first;
#pragma unroll 8
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      int32_t& count = call.chunk_counts[chunk * call.num_experts + expert];
      const int32_t routes = count;
      count = static_cast<int32_t>(next); // meaningless with too many rows, when the next kernel does not read it
      next += routes;
    }
  }
  if (threadIdx.x != 0) return;
  call.offsets.set(call.num_experts, min(rows_needed, int64_t{INT_MAX}));
  if (rows_needed > INT_MAX) report(call.errors, EPX_MOE_ERROR_ROWS_NEEDED, 0, 0, rows_needed);
  *call.has_too_many_rows = rows_needed > INT_MAX ? 1 : 0;
}

//   warps  what they do                          what they wait for
//   all    assign one chunk after the other      nothing
__global__ void __launch_bounds__(kThreads) assign_kernel(const __grid_constant__ RowMapCall call) {
  const bool has_too_many_rows = *call.has_too_many_rows != 0;
  for_each_item(num_route_chunks(call.num_routes), [&](int64_t index) {
    const Chunk chunk(call, index);
    for_each_route(call, chunk, false, [&](int64_t route, int expert, unsigned lanes) {
      if (expert >= 0 && !has_too_many_rows) {
        const unsigned lower_lanes = lanes & ((1u << lane()) - 1);
        call.row_map[route] = chunk.counts[expert] + __popc(lower_lanes);
      } else if (route < chunk.end) {
        call.row_map[route] = -1;
      }
      __syncwarp(); // all lanes have read the counts
      if (expert >= 0 && epx::cuda::lowest_bit(lanes) == lane()) chunk.counts[expert] += __popc(lanes);
    });
  });
}

} // namespace

std::vector<const void*> row_map_kernels() {
  return epx::cuda::addresses_of(&count_kernel, &zone_kernel, &assign_kernel);
}

int launch_row_map(const RowMapCall& call, const LaunchTarget& target) {
  const int64_t chunks = num_route_chunks(call.num_routes);
  const cudaStream_t stream = stream_of(target);
  if (chunks > 0)
    if (const cudaError_t error = epx::cuda::launch(&count_kernel, grid_of_warps(chunks, target), stream, call);
        error != cudaSuccess)
      return error;
  const cudaError_t error = epx::cuda::launch(&zone_kernel, {1, kBlockThreads}, stream, call);
  if (error != cudaSuccess || chunks == 0) return error;
  return epx::cuda::launch(&assign_kernel, grid_of_warps(chunks, target), stream, call);
}

} // namespace epx::moe::cuda
