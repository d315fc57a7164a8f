// SPDX-License-Identifier: Apache-2.0
// The timed loop on GPUs is here.
#pragma once

#include <span>

#include "tools/ep_bench/environment.h"
#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/stream_blocker.h"
#include "tools/ep_bench/measure.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {

struct GpuMeasurements {
  Measurements lines;
  Environment environment; // of the timed iterations, all ranks
};

// Does the same as measure() on GPUs. A time is the one between two events on the stream around a call, or around its graph
// replay with options.graph; a barrier of all ranks' streams precedes the first event. Only differences of begin and end are
// known. Nothing waits for the host within an iteration, but
// for calls that a group of several nodes makes one by one: these are enqueued while the stream runs. The rows that stand for
// the experts' outputs are those of the first input set throughout, since their values change no time. The GPU's clocks are
// read between iterations. The call is collective.
GpuMeasurements measure_on_gpu(MeasuredGroup& measured, std::span<const InputSet> sets, const Options& options,
                               const Peers& peers, Gpu& gpu, StreamBlocker& blocker, Sampler& sampler);

} // namespace epx::bench
