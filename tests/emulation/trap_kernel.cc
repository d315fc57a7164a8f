// SPDX-License-Identifier: Apache-2.0
// Implements tests/gpu/trap_kernel.h on the CPU.
#include "tests/gpu/trap_kernel.h"

#include "tests/emulation/streams.h"

namespace epx::test {

void launch_trap(cudaStream_t stream) {
  emulation::enqueue(stream, [] { emulation::end_context(); });
}

} // namespace epx::test
