// The shape of a kernel's grid, for host code that launches it.
#pragma once

#include <cstddef>

namespace epx::cuda {

struct Grid {
  int blocks;
  int threads; // of each block
  size_t shared_bytes = 0;
  bool early = false; // a programmatic successor of the kernel before it in the stream; see launch_cooperative
};

} // namespace epx::cuda
