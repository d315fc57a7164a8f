// SPDX-License-Identifier: Apache-2.0
// The ranks of an LSA domain load from and store to each other's memory of a window at the addresses found here.
#pragma once

#include <cstddef>
#include <span>

#include <nccl.h>

#include "transport/nccl/nccl_versions.h"

namespace epx {

// Writes the base address of each rank's memory of the window, as this GPU sees it, to bases[LSA rank]. `version` is that of
// the library that is loaded. Throws SYSTEM.
void find_lsa_pointers(const NcclVersion& version, ncclWindow_t window, std::span<std::byte*> bases);

} // namespace epx
