// SPDX-License-Identifier: Apache-2.0
// Launches of kernels whose blocks come in clusters.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

namespace epx::moe::cuda::sm90 {

struct ClusterGrid {
  dim3 blocks, threads, cluster;
  size_t shared_bytes; // dynamic, of each block; the kernel's limit is raised to it
};

template <typename Params>
cudaError_t launch_clusters(const void* kernel, const ClusterGrid& grid, cudaStream_t stream, Params params) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {grid.cluster.x, grid.cluster.y, grid.cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  void* pointers[] = {&params};
  return cudaLaunchKernelExC(&config, kernel, pointers);
}

} // namespace epx::moe::cuda::sm90
