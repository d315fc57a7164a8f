// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/gpu_identity.h"

#include <algorithm>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

namespace epx {

GpuIdentity find_gpu() noexcept {
  GpuIdentity gpu;
  cudaDeviceProp properties;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    cudaGetLastError();
    return gpu;
  }
  gpu.device = device;
  std::copy_n(properties.uuid.bytes, gpu.uuid.size(), gpu.uuid.begin());
  return gpu;
}

std::string why_not_a_gpu_each(std::span<const GpuIdentity> gpus) {
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    if (gpus[rank].device < 0) return fmt::format("rank {} has no GPU (no driver, or no device)", rank);
    for (size_t other = 0; other < rank; ++other)
      if (gpus[other].uuid == gpus[rank].uuid)
        return fmt::format("ranks {} and {} share a GPU (device {} of rank {})", other, rank, gpus[rank].device, rank);
  }
  return "";
}

} // namespace epx
