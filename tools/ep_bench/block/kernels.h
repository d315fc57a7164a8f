// SPDX-License-Identifier: Apache-2.0
// Fills parameters on the GPU, where the host would take minutes for a large model's.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "tools/ep_bench/block/numbers.h"

namespace epx::bench {

// Writes `count` elements of a stream times `scale`, as bfloat16 or float32.
cudaError_t launch_fill(void* data, int64_t count, const BlockStream& stream, float scale, bool is_bf16,
                        cudaStream_t cuda_stream);

} // namespace epx::bench
