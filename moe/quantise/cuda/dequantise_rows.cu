// SPDX-License-Identifier: Apache-2.0
// Rows in E4M3 to wide ones. Each warp takes one row after the other; a lane has four neighbouring elements of each 128.
#include <cuda_bf16.h>

#include "base/device/kernel_addresses.h"
#include "base/device/launch.h"
#include "moe/cuda/elements.cuh"
#include "moe/cuda/warps.cuh"
#include "moe/gemm/zones.cuh"
#include "moe/quantise/cuda/kernels.h"
#include "moe/quantise/cuda/row_blocks.cuh"
#include "runtime/formats/elements.h"
#include "runtime/stages/cuda/rows/quantised_row.cuh"

namespace epx::moe::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads) dequantise_rows_kernel(const __grid_constant__ DequantiseRows call) {
  const DeviceZones zones = device_zones(call.zones);
  const int64_t blocks = call.num_columns / kQuantiseBlock;
  for_each_item(rows_in_use(zones), [&](int64_t row) {
    if (expert_of_row(zones, row) < 0) return;
    const uint8_t* const codes = call.codes + row * call.num_columns + lane() * kLaneColumns;
    const float* const scales = call.scales + row * blocks;
    T* const to = static_cast<T*>(call.rows) + row * call.num_columns + lane() * kLaneColumns;
#pragma unroll 4
    for (int64_t block = 0; block < blocks; ++block) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + block * kQuantiseBlock);
      const float scale = scales[block];
      float x[kLaneColumns];
#pragma unroll
      for (int j = 0; j < kLaneColumns; j += 2) {
        const float2 two = epx::cuda::decode_two<formats::E4M3>(word >> (8 * j) & 0xffff);
        x[j] = two.x * scale;
        x[j + 1] = two.y * scale;
      }
      store(to + block * kQuantiseBlock, x);
    }
  });
}

template <typename T>
cudaError_t launch_rows(const DequantiseRows& call, const LaunchTarget& target) {
  return epx::cuda::launch(&dequantise_rows_kernel<T>, grid_of_warps(call.zones.num_rows, target), stream_of(target), call);
}

} // namespace

int launch_dequantise_rows(const DequantiseRows& call, const LaunchTarget& target) {
  if (call.zones.num_rows == 0 || call.zones.num_zones == 0) return cudaSuccess;
  if (call.dtype == EPX_BFLOAT16) return launch_rows<__nv_bfloat16>(call, target);
  return launch_rows<float>(call, target);
}

std::vector<const void*> block_dequantise_rows_kernels() {
  return epx::cuda::addresses_of(&dequantise_rows_kernel<__nv_bfloat16>);
}

} // namespace epx::moe::cuda
