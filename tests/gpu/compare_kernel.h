// SPDX-License-Identifier: Apache-2.0
// Compares buffers on the device, for runs that are too long to compare every byte on the host.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

namespace epx::test {

// Adds to *count the number of bytes in which two buffers differ. Asynchronous on the stream; all pointers are to device
// memory.
cudaError_t count_differences(const std::byte* one, const std::byte* other, size_t bytes, unsigned long long* count,
                              cudaStream_t stream);

} // namespace epx::test
