// SPDX-License-Identifier: Apache-2.0
// The speed-of-light bound of an operation (option --floor, identifiers "floor") is the time that the hardware needs for moving
// its rows alone, measured in the same run.
#pragma once

#include <span>
#include <vector>

#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/floor/floor_plan.h"
#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/stream_blocker.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

// Returns the bound of each line of the table, in order; none where a line moves no rows. The runs cycle through the input
// sets, as the timed iterations do; a time is the median of the slowest rank's, and the best of all variants is kept. Rows are
// rounded up to 16 bytes. With options.verify it is first checked that the kernels move every row. The call is collective.
Floors measure_floors(std::span<const RoutingOfAll> sets, const Options& options, const Peers& peers, Gpu& gpu,
                      StreamBlocker& blocker);

} // namespace epx::bench
