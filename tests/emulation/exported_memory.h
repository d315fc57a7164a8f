// SPDX-License-Identifier: Apache-2.0
// Other processes can map exported memory, as with CUDA's IPC handles. It has no name: a handle contains the process id and
// the file descriptor there.
#pragma once

#include <cstddef>

namespace epx::emulation {

void* allocate_exportable(size_t bytes);                    // zeroed; NULL on failure
bool export_memory(const void* memory, char (&handle)[64]); // false: not such memory
void* open_exported(const char (&handle)[64]);              // NULL on failure
bool free_exportable(void* memory);                         // allocated or opened; false: not such memory

} // namespace epx::emulation
