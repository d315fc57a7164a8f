// SPDX-License-Identifier: Apache-2.0
// Measures the native way (--native) in the run and with the input sets of the measured library.
#pragma once

#include <span>

#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/stream_blocker.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/native/native_figures.h"
#include "tools/ep_bench/options.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/workload/workload.h"

namespace epx::bench {

// Makes each call as often as measure_on_gpu() does, alone, after a barrier of all ranks' streams. Calls that wait on the host
// are enqueued while the stream runs; the others while it is blocked. With options.verify the results of the first
// kVerifiedSets input sets are compared with the serial reference before. No route may be dropped. Collective.
NativeMeasurements measure_native(MeasuredGroup& measured, std::span<const InputSet> sets, const Workload& workload,
                                  const Options& options, const Peers& peers, Gpu& gpu, StreamBlocker& blocker);

} // namespace epx::bench
