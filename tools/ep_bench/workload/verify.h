// SPDX-License-Identifier: Apache-2.0
// Compares the library with the serial reference.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {

using WrongCounts = std::vector<int64_t>; // elements, in the order of operations_of(layout)

inline constexpr int kVerifiedSets = 2;

// Runs all operations of the layout on the first kVerifiedSets input sets, with scribbled outputs, and compares every output,
// rows that must stay untouched too, with the reference. Every rank makes the inputs of all ranks again and runs the reference
// on them. Returns the wrong elements of all ranks together. Collective.
WrongCounts verify(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers);

} // namespace epx::bench
