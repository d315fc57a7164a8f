// SPDX-License-Identifier: Apache-2.0
// Lists of kernels, for host code that loads them before it launches any.
#pragma once

#include <vector>

namespace epx::cuda {

// The addresses that functions of the CUDA runtime take for kernels.
template <typename... Kernels>
std::vector<const void*> addresses_of(Kernels... kernels) {
  return {reinterpret_cast<const void*>(kernels)...};
}

} // namespace epx::cuda
