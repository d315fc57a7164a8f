// SPDX-License-Identifier: Apache-2.0
// slowed_calls.cc slows the calls on a stream by these kernels.
#pragma once

#include <cuda_runtime_api.h>

namespace epx::test {

// Both are asynchronous on the stream, and may be captured in a graph. What is timed around them takes `fraction` longer, about,
// than with a fraction of 0, which adds some microseconds too. A process has one such stream at a time.
cudaError_t launch_note_begin(cudaStream_t stream);
cudaError_t launch_spin(double fraction, cudaStream_t stream);

} // namespace epx::test
