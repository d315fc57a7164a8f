// SPDX-License-Identifier: Apache-2.0
// How routing loads the ranks: what epx_load_of_counts tells.
#pragma once

#include <cstdint>
#include <span>

#include "epx/epx.h"
#include "runtime/layout/slots.h"

namespace epx {

// counts: [P, E], routes from each rank to each expert. Returns the report with struct_size 0, which the C API sets.
epx_load_report load_of(std::span<const int64_t> counts, const ExpertBlocks& experts, const ZoneRule& zones);

} // namespace epx
