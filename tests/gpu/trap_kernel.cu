// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/trap_kernel.h"

namespace epx::test {
namespace {

__global__ void trap_kernel() {
  __trap();
}

} // namespace

void launch_trap(cudaStream_t stream) {
  trap_kernel<<<1, 1, 0, stream>>>();
}

} // namespace epx::test
