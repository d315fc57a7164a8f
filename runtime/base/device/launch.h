// How kernels are started, with their parameters' types checked, and how a block finds its dynamic shared memory.
#pragma once

#include <cstddef>
#include <type_traits>

#include <cuda_runtime_api.h>

namespace epx::cuda {

struct Grid {
  int blocks;
  int threads; // of each block
  size_t shared_bytes = 0;
};

// All blocks run at the same time, or the launch fails: a block may wait for another one of its grid.
template <typename... Params>
cudaError_t launch_cooperative(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                               std::type_identity_t<Params>... params) {
  void* pointers[] = {&params...};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid.blocks)),
                                     dim3(static_cast<unsigned>(grid.threads)), pointers, grid.shared_bytes, stream);
}

// Blocks that do not wait for each other.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                   std::type_identity_t<Params>... params) {
  void* pointers[] = {&params...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid.blocks)),
                          dim3(static_cast<unsigned>(grid.threads)), pointers, grid.shared_bytes, stream);
}

// Brings the kernel to the device, and lets its blocks have so much dynamic shared memory: a kernel that is loaded when it is
// first launched would wait for one that is waiting.
template <typename... Params>
cudaError_t load(void (*kernel)(Params...), size_t shared_bytes = 0) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess || shared_bytes == 0) return error;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

#if defined(__CUDACC__)
// 128 bytes aligned.
template <typename T>
__device__ inline T* dynamic_shared_memory() {
  extern __shared__ __align__(128) unsigned char epx_dynamic_shared_memory[];
  return reinterpret_cast<T*>(epx_dynamic_shared_memory);
}
#endif

} // namespace epx::cuda
