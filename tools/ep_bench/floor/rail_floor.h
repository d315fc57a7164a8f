// SPDX-License-Identifier: Apache-2.0
// In a group of several nodes the speed-of-light bound (--floor) is the time that NCCL alone needs for the rows that must cross
// between nodes, measured in the same run.
#pragma once

#include <span>

#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/floor/floor_plan.h"
#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/stream_blocker.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

// Returns the bound of each line of the table, in order, as its wire bound; none where a line moves no rows. A run is one group
// of ncclSend and ncclRecv between all rail peers, with the bytes of the distinct rows of rail_plan.h and no others. The runs
// cycle through the input sets, as the timed iterations do; a time is the median of the slowest rank's. With options.verify it
// is first checked that all bytes come. The call is collective.
Floors measure_rail_floors(std::span<const RoutingOfAll> sets, int ranks_per_node, const Options& options,
                           const Peers& peers, Gpu& gpu, StreamBlocker& blocker);

} // namespace epx::bench
