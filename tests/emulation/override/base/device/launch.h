// SPDX-License-Identifier: Apache-2.0
// Replaces base/device/launch.h.
#pragma once

#include <cstddef>
#include <type_traits>

#include "base/device/grid.h"
#include "tests/emulation/device.h"
#include "tests/emulation/streams.h"

namespace epx::cuda {

template <typename... Params>
cudaError_t launch_cooperative(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                               std::type_identity_t<Params>... params) {
  if (emulation::context_error() != cudaSuccess) return emulation::context_error();
  emulation::enqueue(
      stream, [=] { emulation::run_grid(grid.blocks, grid.threads, grid.shared_bytes, [=] { kernel(params...); }); });
  return cudaSuccess;
}

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream,
                   std::type_identity_t<Params>... params) {
  return launch_cooperative(kernel, grid, stream, params...);
}

template <typename... Params>
cudaError_t load(void (*)(Params...), size_t = 0) {
  return cudaSuccess;
}

template <typename... Params>
void pdl_wait(const Params&...) {}
inline void trigger_successor() {}

template <typename T>
T* dynamic_shared_memory() {
  return reinterpret_cast<T*>(emulation::dynamic_shared_memory());
}

} // namespace epx::cuda
