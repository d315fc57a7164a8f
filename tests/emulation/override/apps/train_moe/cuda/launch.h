// SPDX-License-Identifier: Apache-2.0
// Replaces apps/train_moe/cuda/launch.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tests/emulation/device.h"
#include "tests/emulation/streams.h"

namespace train::cuda {

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream,
                   std::type_identity_t<Params>... params) {
  epx::emulation::enqueue(
      stream, [=] { epx::emulation::run_grid(static_cast<int>(blocks), threads, 0, [=] { kernel(params...); }); });
  return cudaSuccess;
}

} // namespace train::cuda
