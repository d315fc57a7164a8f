// How kernels are started, with their parameters' types checked, and how a block finds its dynamic shared memory.
#pragma once

#include <cstddef>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "base/device/grid.h"

namespace epx::cuda {

// All blocks run at the same time, or the launch fails: a block may wait for another one of its grid. An early grid is a
// programmatic successor (programmatic dependent launch, PDL): its blocks may become resident once every block of the kernel
// before it in the stream has ended or called trigger_successor(); it begins with pdl_wait().
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
  config.numAttrs = grid.early ? 2 : 1;
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
}

// Blocks that do not wait for each other.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                   std::type_identity_t<Params>... params) {
  void* pointers[] = {&params...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid.blocks)),
                          dim3(static_cast<unsigned>(grid.threads)), pointers, grid.shared_bytes, stream);
}

// Brings the kernel to the device, and lets its blocks have so much dynamic shared memory: a kernel that is loaded when it
// is first launched would wait for one that is waiting.
template <typename... Params>
cudaError_t load(void (*kernel)(Params...), size_t shared_bytes = 0) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess || shared_bytes == 0) return error;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

#if defined(__CUDACC__)
// Brings a kernel's parameters into the constant cache, which is cold when it begins, all lines at once.
template <typename Params>
__device__ inline void fetch(const Params& params) {
  constexpr unsigned kLineBytes = 64;
  constexpr unsigned kLines = sizeof(Params) / kLineBytes;
  static_assert(kLines > 0);
  constexpr unsigned kLanes = 32;
  const unsigned index = threadIdx.x % kLanes * (blockDim.x / kLanes) + threadIdx.x / kLanes; // each warp some
  const unsigned line = index < kLines ? index : kLines - 1;
  const auto word = reinterpret_cast<const unsigned*>(&params)[line * (kLineBytes / sizeof(unsigned))];
  asm volatile("{\n"
               ".reg .pred rare;\n"
               "setp.eq.u32 rare, %0, 0x9e3779b9;\n"
               "@rare nanosleep.u32 1;\n" // a use, lest the load be left out
               "}" ::"r"(word));
}

// Waits until the kernels before this one in the stream have ended and all that they stored is visible
// (griddepcontrol.wait). In a grid that is not early only the parameters (__grid_constant__) are fetched.
template <typename... Params>
__device__ inline void pdl_wait(const Params&... params) {
  (fetch(params), ...);
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the programmatic successor become resident once every block has called this or ended (griddepcontrol.launch_dependents).
// The successor may be a kernel of somebody else, and its blocks hold their SMs until this grid has ended. So no thread of the
// block waits for a peer after any thread of it has called this: what the successor holds is then held for a moment, never
// for as long as a peer takes.
__device__ inline void trigger_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 128 bytes aligned.
template <typename T>
__device__ inline T* dynamic_shared_memory() {
  extern __shared__ __align__(128) unsigned char epx_dynamic_shared_memory[];
  return reinterpret_cast<T*>(epx_dynamic_shared_memory);
}
#endif

} // namespace epx::cuda
