// SPDX-License-Identifier: Apache-2.0
// Kernel launches that check the types of the parameters, programmatic dependent launch (PDL), and dynamic shared memory.
#pragma once

#include <cstddef>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "base/device/grid.h"

namespace epx::cuda {

// A cooperative launch: all blocks are resident at the same time, or the launch fails, so a block may wait for another one of
// its grid. With grid.pdl the kernel is a programmatic dependent launch (PDL): its blocks may become resident once every block
// of the kernel before it in the stream has ended or called trigger_successor(); such a kernel begins with pdl_wait().
template <typename... Params>
cudaError_t launch_cooperative(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                               std::type_identity_t<Params>... params) {
  void* pointers[] = {&params...};
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = grid.pdl ? 2 : 1;
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
}

// An ordinary launch, for kernels whose blocks do not wait for each other.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                   std::type_identity_t<Params>... params) {
  void* pointers[] = {&params...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid.blocks)),
                          dim3(static_cast<unsigned>(grid.threads)), pointers, grid.shared_bytes, stream);
}

// Loads the kernel onto the device, and raises its limit of dynamic shared memory. Lazy loading at the first launch would wait
// for the kernels that run, and one of these may be waiting for a peer.
template <typename... Params>
cudaError_t load(void (*kernel)(Params...), size_t shared_bytes = 0) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess || shared_bytes == 0) return error;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

#if defined(__CUDACC__)
// Loads the kernel's parameters into the constant cache, which is cold when the kernel begins: all lines at the same time,
// each by another warp where there are enough warps.
template <typename Params>
__device__ inline void prefetch_params(const Params& params) {
  constexpr unsigned kLineBytes = 64;
  constexpr unsigned kLines = sizeof(Params) / kLineBytes;
  static_assert(kLines > 0);
  constexpr unsigned kLanes = 32;
  const unsigned index =
      threadIdx.x % kLanes * (blockDim.x / kLanes) + threadIdx.x / kLanes; // spreads the lines over the warps
  const unsigned line = index < kLines ? index : kLines - 1;
  const auto word = reinterpret_cast<const unsigned*>(&params)[line * (kLineBytes / sizeof(unsigned))];
  asm volatile("{\n"
               ".reg .pred rare;\n"
               "setp.eq.u32 rare, %0, 0x9e3779b9;\n"
               "@rare nanosleep.u32 1;\n" // the load needs a use, or the compiler removes it
               "}" ::"r"(word));
}

// griddepcontrol.wait: waits until the kernels before this one in the stream have ended and their stores are visible. Without
// PDL it returns at once. The parameters (__grid_constant__) are prefetched in either case.
template <typename... Params>
__device__ inline void pdl_wait(const Params&... params) {
  (prefetch_params(params), ...);
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// griddepcontrol.launch_dependents: the dependent kernel may become resident once every block has called this or ended. That
// kernel may belong to another library, and its blocks hold their SMs until this grid has ended. So no thread of a block waits
// for a peer after any thread of the block has called this: the dependent kernel then holds its SMs only briefly, and never for
// as long as a peer takes.
__device__ inline void trigger_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// The address is aligned to 128 bytes.
template <typename T>
__device__ inline T* dynamic_shared_memory() {
  extern __shared__ __align__(128) unsigned char epx_dynamic_shared_memory[];
  return reinterpret_cast<T*>(epx_dynamic_shared_memory);
}
#endif

} // namespace epx::cuda
