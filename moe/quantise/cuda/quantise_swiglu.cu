// SPDX-License-Identifier: Apache-2.0
// SwiGLU and its backward, quantised. A block of threads takes 128 columns of F in the rows of a block of a zone. Forward, it loads
// the tiles of gate and up, computes a tile from them in registers, and quantises it (quantise_tile.cuh). Backward, it computes the
// tiles of its three outputs, and leaves them in shared memory. Then it begins to load the next tiles, and quantises one output
// after the other. Each warp adds up its rows' parts of grad_recv_weights, and a kernel of its own adds the parts of the tiles in
// their order.
#include <cuda_bf16.h>

#include "base/device/kernel_addresses.h"
#include "base/device/launch.h"
#include "moe/cuda/warps.cuh"
#include "moe/ffn/activation.h"
#include "moe/quantise/cuda/kernels.h"
#include "moe/quantise/cuda/quantise_tile.cuh"

namespace epx::moe::cuda {
namespace {

enum Output { kGradGate, kGradUp, kH, kNumOutputs };
struct BwdMemory {
  StagedElements outputs[kNumOutputs];
  QuantiseTileMemory quantised;
};
constexpr int kBwdBlocksPerSm = 1; // shared memory has no room for more

// Returns the weight of row lane() % kWarpRows of the warp; any finite number where that is beyond the rows.
__device__ float own_weight_of(const float* recv_weights, const RowBlock& block) {
  const int i = warp_of_tile() * kWarpRows + lane() % kWarpRows;
  return recv_weights != nullptr && i < block.num_rows ? recv_weights[block.first_row + i] : 1.0f;
}

// A thread's elements of pre_act, and the weight of row lane() % kWarpRows of its warp.
template <typename T>
struct Inputs {
  TileElements<T> gates, ups;
  float own_weight;

  __device__ void load(const void* pre_act, const float* recv_weights, int64_t inner, const Tile& tile) {
    const RowBlock& block = tile.block;
    const T* const first = static_cast<const T*>(pre_act) + block.first_row * 2 * inner + int64_t{tile.place} * kTile;
    gates.load(first, 2 * inner, block.num_rows);
    ups.load(first + inner, 2 * inner, block.num_rows);
    own_weight = own_weight_of(recv_weights, block);
  }
};

template <typename T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    quantise_swiglu_kernel(const __grid_constant__ QuantiseSwiglu call) {
  __shared__ QuantiseTileMemory shared;
  Tiles tiles(call.zones, call.h.num_columns);
  for (Tile tile; tiles.next(tile);) {
    Inputs<T> inputs;
    inputs.load(call.pre_act, call.recv_weights, call.h.num_columns, tile);
    TileElements<float> h;
    for_each_row(inputs.gates, [&](int i, const float(&gate)[kLaneColumns]) {
      float up[kLaneColumns], x[kLaneColumns];
      inputs.ups.unpack(i, up);
      const float weight = from_lane(inputs.own_weight, i);
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j)
        x[j] = weight * swiglu(gate[j], up[j]);
      h.set_row(i, x);
    });
    quantise_tile(h, call.h, tile, shared);
  }
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads, kBwdBlocksPerSm)
    quantise_swiglu_bwd_kernel(const __grid_constant__ QuantiseSwigluBwd call) {
  BwdMemory& shared = *epx::cuda::dynamic_shared_memory<BwdMemory>();
  const int64_t inner = call.h.num_columns;
  const bool wants_grads = call.grads.row_codes != nullptr || call.grads.column_codes != nullptr;
  const bool wants_h = call.h.column_codes != nullptr;
  Tiles tiles(call.zones, inner);
  Tile next;
  Inputs<T> inputs;
  TileElements<T> grads;
  const auto load_next = [&] {
    inputs.load(call.pre_act, call.recv_weights, inner, next);
    grads.load(static_cast<const T*>(call.grad_h) + next.block.first_row * inner + int64_t{next.place} * kTile, inner,
               next.block.num_rows);
  };
  bool has_next = tiles.next(next);
  if (has_next) load_next();
  while (has_next) {
    const Tile tile = next;
    for_each_row(inputs.gates, [&](int i, const float(&gate)[kLaneColumns]) {
      float up[kLaneColumns], grad[kLaneColumns], outputs[kNumOutputs][kLaneColumns];
      inputs.ups.unpack(i, up);
      grads.unpack(i, grad);
      const float weight = from_lane(inputs.own_weight, i);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) {
        const float h = swiglu(gate[j], up[j]);
        const GateUp<float> of_pre_act = swiglu_bwd(gate[j], up[j], weight * grad[j]);
        outputs[kGradGate][j] = of_pre_act.gate;
        outputs[kGradUp][j] = of_pre_act.up;
        outputs[kH][j] = weight * h;
        sum = __fmaf_rn(grad[j], h, sum);
      }
#pragma unroll
      for (int output = 0; output < kNumOutputs; ++output)
        shared.outputs[output].set_row(i, outputs[output]);
      if (call.tile_sums == nullptr) return;
      sum = sum_of_lanes(sum);
      const int row = warp_of_tile() * kWarpRows + i;
      if (lane() == 0 && row < tile.block.num_rows)
        call.tile_sums[tile.place * call.zones.num_rows + tile.block.first_row + row] = sum;
    });
    has_next = tiles.next(next);
    if (has_next) load_next();
#pragma unroll 1
    for (int output = wants_grads ? kGradGate : kH; output < (wants_h ? kNumOutputs : kH); ++output) {
      Tile of_output = tile;
      if (output == kGradUp) of_output.place += static_cast<unsigned>(inner / kTile);
      quantise_tile(shared.outputs[output], output == kH ? call.h : call.grads, of_output, shared.quantised);
    }
  }
}

// One thread takes one row after the other.
__global__ void __launch_bounds__(kThreads) add_tile_sums_kernel(const __grid_constant__ QuantiseSwigluBwd call) {
  const DeviceZones zones = device_zones(call.zones);
  const int64_t num_rows = call.zones.are_given ? rows_in_use(zones) : call.zones.num_rows;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < num_rows;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    if (call.zones.are_given && expert_of_row(zones, row) < 0) continue;
    float sum = 0;
    for (int64_t place = 0; place < call.h.num_columns / kTile; ++place)
      sum += call.tile_sums[place * call.zones.num_rows + row];
    call.grad_recv_weights[row] = sum;
  }
}

} // namespace

int launch_quantise_swiglu(const QuantiseSwiglu& call, const LaunchTarget& target) {
  if (call.zones.num_rows == 0 || call.zones.num_zones == 0) return cudaSuccess;
  const auto kernel = call.dtype == EPX_BFLOAT16 ? &quantise_swiglu_kernel<__nv_bfloat16> : &quantise_swiglu_kernel<float>;
  return epx::cuda::launch(kernel, grid_of_tiles(most_tiles(call.zones, call.h.num_columns), target), stream_of(target),
                           call);
}

int launch_quantise_swiglu_bwd(const QuantiseSwigluBwd& call, const LaunchTarget& target) {
  if (call.zones.num_rows == 0 || call.zones.num_zones == 0) return cudaSuccess;
  const auto kernel =
      call.dtype == EPX_BFLOAT16 ? &quantise_swiglu_bwd_kernel<__nv_bfloat16> : &quantise_swiglu_bwd_kernel<float>;
  epx::cuda::Grid grid = grid_of_tiles(most_tiles(call.zones, call.h.num_columns), target, kBwdBlocksPerSm);
  grid.shared_bytes = sizeof(BwdMemory);
  cudaError_t error = epx::cuda::load(kernel, grid.shared_bytes);
  if (error == cudaSuccess) error = epx::cuda::launch(kernel, grid, stream_of(target), call);
  if (error != cudaSuccess || call.grad_recv_weights == nullptr) return error;
  return epx::cuda::launch(&add_tile_sums_kernel, grid_of_warps((call.zones.num_rows + kWarp - 1) / kWarp, target),
                           stream_of(target), call);
}

std::vector<const void*> block_quantise_swiglu_kernels() {
  return epx::cuda::addresses_of(&quantise_swiglu_kernel<__nv_bfloat16>, &quantise_swiglu_bwd_kernel<__nv_bfloat16>,
                                 &add_tile_sums_kernel);
}

} // namespace epx::moe::cuda
