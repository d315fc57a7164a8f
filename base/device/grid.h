// SPDX-License-Identifier: Apache-2.0
// The launch configuration of a kernel, for host code.
#pragma once

#include <cstddef>

namespace epx::cuda {

struct Grid {
  int blocks;
  int threads; // of each block
  size_t shared_bytes = 0;
  bool pdl = false; // programmatic dependent launch on the kernel before it in the stream; see launch_cooperative
};

} // namespace epx::cuda
