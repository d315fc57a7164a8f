// SPDX-License-Identifier: Apache-2.0
// Memory of a device that cudaMalloc did not return: windows, which on a GPU are ncclMemAlloc's.
#pragma once

#include <cstddef>

namespace epx::emulation {

// From now on cudaPointerGetAttributes says that these bytes are memory of the calling thread's current device.
void add_device_memory(const void* memory, size_t bytes);
void remove_device_memory(const void* memory);

} // namespace epx::emulation
