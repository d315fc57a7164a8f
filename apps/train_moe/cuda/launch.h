// SPDX-License-Identifier: Apache-2.0
// An ordinary kernel launch, which checks the types of the parameters. The tests have another launch.h, which runs kernels on
// a CPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_runtime_api.h>

namespace train::cuda {

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream,
                   std::type_identity_t<Params>... params) {
  void* pointers[] = {&params...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                          dim3(static_cast<unsigned>(threads)), pointers, 0, stream);
}

} // namespace train::cuda
