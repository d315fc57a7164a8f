// SPDX-License-Identifier: Apache-2.0
// SwiGLU and its backward, quantised. A block of threads takes 128 columns of F in the rows of a block of a zone: it loads the tiles
// of gate and up, and of grad_h, computes one tile after the other from them in registers, and quantises it: quantise_tile.cuh.
// Each warp adds up its rows' parts of grad_recv_weights, and a kernel of its own adds the parts of the tiles in their order.
#include <cuda_bf16.h>

#include "base/device/kernel_addresses.h"
#include "base/device/launch.h"
#include "moe/cuda/warps.cuh"
#include "moe/ffn/activation.h"
#include "moe/quantise/cuda/kernels.h"
#include "moe/quantise/cuda/quantise_tile.cuh"

namespace epx::moe::cuda {
namespace {

// The backward has three tiles in registers, and a fourth one that it computes. Its loop over outputs is not unrolled: the compiler
// would keep what they have in common.
constexpr int kBwdBlocksPerSm = 1;

// Returns the weight of row lane() % kWarpRows of the warp; any finite number where that is beyond the rows.
__device__ float own_weight_of(const float* recv_weights, const RowBlock& block) {
  const int i = warp_of_tile() * kWarpRows + lane() % kWarpRows;
  return recv_weights != nullptr && i < block.num_rows ? recv_weights[block.first_row + i] : 1.0f;
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    quantise_swiglu_kernel(const __grid_constant__ QuantiseSwiglu call) {
  __shared__ QuantiseTileMemory shared;
  const int64_t inner = call.h.num_columns;
  for_each_tile(call.zones, inner, [&](int64_t index, int64_t place, const RowBlock& block) {
    const T* const tile = static_cast<const T*>(call.pre_act) + block.first_row * 2 * inner + place * kTile;
    TileElements<T> gates, ups;
    gates.load(tile, 2 * inner, block.num_rows);
    ups.load(tile + inner, 2 * inner, block.num_rows);
    const float own_weight = own_weight_of(call.recv_weights, block);
    TileElements<float> h;
    gates.for_each_row([&](int i, const float(&gate)[kLaneColumns]) {
      float up[kLaneColumns], x[kLaneColumns];
      ups.unpack(i, up);
      const float weight = from_lane(own_weight, i);
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j)
        x[j] = weight * swiglu(gate[j], up[j]);
      h.set_row(i, x);
    });
    quantise_tile(h, call.h, block, index, place, shared);
  });
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads, kBwdBlocksPerSm)
    quantise_swiglu_bwd_kernel(const __grid_constant__ QuantiseSwigluBwd call) {
  __shared__ QuantiseTileMemory shared;
  const int64_t inner = call.h.num_columns;
  for_each_tile(call.zones, inner, [&](int64_t index, int64_t place, const RowBlock& block) {
    const T* const tile = static_cast<const T*>(call.pre_act) + block.first_row * 2 * inner + place * kTile;
    TileElements<T> gates, ups, grads;
    gates.load(tile, 2 * inner, block.num_rows);
    ups.load(tile + inner, 2 * inner, block.num_rows);
    grads.load(static_cast<const T*>(call.grad_h) + block.first_row * inner + place * kTile, inner, block.num_rows);
    const float own_weight = own_weight_of(call.recv_weights, block);

    const bool wants_grads = call.grads.row_codes != nullptr || call.grads.column_codes != nullptr;
    const bool wants_h = call.h.column_codes != nullptr;
#pragma unroll 1
    for (int output = wants_grads ? 0 : 2; output < (wants_h ? 3 : 2); ++output) { // of gate, of up, h
      TileElements<float> elements;
      gates.for_each_row([&](int i, const float(&gate)[kLaneColumns]) {
        float up[kLaneColumns], grad[kLaneColumns], x[kLaneColumns];
        ups.unpack(i, up);
        grads.unpack(i, grad);
        const float weight = from_lane(own_weight, i);
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) {
          const GateUp<float> of_pre_act = swiglu_bwd(gate[j], up[j], weight * grad[j]);
          x[j] = output == 0 ? of_pre_act.gate : output == 1 ? of_pre_act.up : weight * swiglu(gate[j], up[j]);
        }
        elements.set_row(i, x);
      });
      quantise_tile(elements, output < 2 ? call.grads : call.h, block, index, output == 1 ? inner / kTile + place : place,
                    shared);
    }
    if (call.tile_sums == nullptr) return;
    gates.for_each_row([&](int i, const float(&gate)[kLaneColumns]) {
      float up[kLaneColumns], grad[kLaneColumns];
      ups.unpack(i, up);
      grads.unpack(i, grad);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j)
        sum = __fmaf_rn(grad[j], swiglu(gate[j], up[j]), sum);
      sum = sum_of_lanes(sum);
      const int row = warp_of_tile() * kWarpRows + i;
      if (lane() == 0 && row < block.num_rows) call.tile_sums[place * call.zones.num_rows + block.first_row + row] = sum;
    });
  });
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
  const cudaError_t error = epx::cuda::launch(
      kernel, grid_of_tiles(most_tiles(call.zones, call.h.num_columns), target, kBwdBlocksPerSm), stream_of(target), call);
  if (error != cudaSuccess || call.grad_recv_weights == nullptr) return error;
  return epx::cuda::launch(&add_tile_sums_kernel, grid_of_warps((call.zones.num_rows + kWarp - 1) / kWarp, target),
                           stream_of(target), call);
}

std::vector<const void*> block_quantise_swiglu_kernels() {
  return epx::cuda::addresses_of(&quantise_swiglu_kernel<__nv_bfloat16>, &quantise_swiglu_bwd_kernel<__nv_bfloat16>,
                                 &add_tile_sums_kernel);
}

} // namespace epx::moe::cuda
