// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/gpu_identity.h"

#include <algorithm>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "base/cuda_error.h"
#include "transport/topology/rank_place.h"

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
  gpu.compute_capability = 10 * properties.major + properties.minor;
  std::copy_n(properties.uuid.bytes, gpu.uuid.size(), gpu.uuid.begin());
  gpu.host_id_hash = this_rank_place().host_id_hash;
  return gpu;
}

std::string why_not_a_gpu_each(std::span<const GpuIdentity> gpus) {
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    if (gpus[rank].device < 0) return fmt::format("rank {} has no GPU (no driver, or no device)", rank);
    for (size_t other = 0; other < rank; ++other)
      if (gpus[other].uuid == gpus[rank].uuid && gpus[other].host_id_hash == gpus[rank].host_id_hash)
        return fmt::format("ranks {} and {} share a GPU (device {} of rank {})", other, rank, gpus[rank].device, rank);
  }
  return "";
}

std::string why_not_new_enough(std::span<const GpuIdentity> gpus) {
  for (size_t rank = 0; rank < gpus.size(); ++rank)
    if (const std::string why = why_too_old(gpus[rank].compute_capability); !why.empty())
      return fmt::format("the GPU of rank {} (its device {}) {}", rank, gpus[rank].device, why);
  return "";
}

} // namespace epx
