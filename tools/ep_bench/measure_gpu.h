// The timed loop on GPUs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/ep_bench/exchange.h"
#include "tools/ep_bench/gpu.h"
#include "tools/ep_bench/measure.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/stream_blocker.h"
#include "tools/ep_bench/workload.h"

namespace epx::bench {

// As measure(). A time is that between two events on the stream around a call, or around its replay with options.graph;
// before the first event comes a barrier of all ranks' streams. Only differences of the begin and end are known. Nothing
// waits for the host within an iteration. The rows that stand for the experts' are those of the first input set throughout:
// their values change no time. Collective.
Measurements measure_on_gpu(Exchange& exchange, std::span<const InputSet> sets, const Options& options, const Peers& peers,
                            Gpu& gpu, StreamBlocker& start);

// The durations of all ranks, [rank][i], from the same number of each. Collective.
std::vector<Series> gather_durations(std::span<const int64_t> mine_ns, const Peers& peers);

} // namespace epx::bench
