// Where the ranks of an LSA domain see each other's share of a window.
#pragma once

#include <cstddef>
#include <span>

#include <nccl.h>

#include "transport/nccl/nccl_versions.h"

namespace epx {

// Writes the address of each rank's share of the window, as this GPU sees it, to bases, by LSA rank. `version`: of the library
// that is loaded. Throws SYSTEM.
void find_lsa_pointers(const NcclVersion& version, ncclWindow_t window, std::span<std::byte*> bases);

} // namespace epx
