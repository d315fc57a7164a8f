// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/kernels.h"

#include <algorithm>

#include "base/device/launch.h"

namespace epx::bench {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

__global__ void fill_bf16(uint16_t* data, int64_t count, BlockStream stream, float scale) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
    data[i] = bf16_bits(stream.symmetric(static_cast<uint32_t>(i)) * scale);
}

__global__ void fill_fp32(float* data, int64_t count, BlockStream stream, float scale) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
    data[i] = stream.symmetric(static_cast<uint32_t>(i)) * scale;
}

} // namespace

cudaError_t launch_fill(void* data, int64_t count, const BlockStream& stream, float scale, bool is_bf16,
                        cudaStream_t cuda_stream) {
  const cuda::Grid grid{static_cast<int>(std::clamp((count + kThreads - 1) / kThreads, int64_t{1}, kMaxBlocks)), kThreads};
  if (is_bf16) return cuda::launch(&fill_bf16, grid, cuda_stream, static_cast<uint16_t*>(data), count, stream, scale);
  return cuda::launch(&fill_fp32, grid, cuda_stream, static_cast<float*>(data), count, stream, scale);
}

} // namespace epx::bench
