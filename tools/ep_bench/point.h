// SPDX-License-Identifier: Apache-2.0
// Measures one point of a sweep, in a group of its own.
#pragma once

#include "epx/epx.h"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/pacer.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/report.h"

namespace epx::bench {

// Creates the group, verifies (--verify), and measures the exchange and what else the options ask for. `ranks_here` are the ranks
// of this machine. Collective. Throws AgreedError where the point fails on all ranks together, which leaves no group behind;
// another exception where a rank no longer answers.
Results measure_point(const Options& options, const epx_bootstrap& bootstrap, const Peers& peers, Memory& memory,
                      int ranks_here, Pacer& pacer);

} // namespace epx::bench
