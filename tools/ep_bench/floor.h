// The floor: what the hardware needs for the rows of an operation alone, measured beside the operation.
#pragma once

#include <span>
#include <vector>

#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/floor_plan.h"
#include "tools/ep_bench/gpu.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/stream_blocker.h"

namespace epx::bench {

// Of each line of the table, in order; none where a line moves no rows. The runs take the input sets in turn, as the timed
// iterations do; a time is the median of the slowest rank's, and the best of all variants is kept. Rows are rounded up to
// 16 bytes. With options.verify it is first checked that the kernels move every row. Collective.
Floors measure_floors(std::span<const RoutingOfAll> sets, const Options& options, const Peers& peers, Gpu& gpu,
                      StreamBlocker& start);

} // namespace epx::bench
