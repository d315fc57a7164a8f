// SPDX-License-Identifier: Apache-2.0
// Measures the whole block beside the exchange, the native layer and the dense bound.
#pragma once

#include <span>

#include "epx/epx.h"
#include "tools/ep_bench/block/results.h"
#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/pacer.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

// Takes the group and the tensors of `measured`, whose figures have the wire bounds where they were measured. With
// options.verify or a dump directory the layers' outputs are compared, and written there. The pacer is in its first phase, the
// set-up; each round is one, and the comparison is the last. The group of --gather is made by the bootstrap. Collective.
BlockResults bench_block(MeasuredGroup& measured, std::span<const InputSet> sets, const Figures& exchange_figures,
                         const Options& options, const epx_bootstrap& bootstrap, const Peers& peers, Memory& memory,
                         Pacer& pacer);

} // namespace epx::bench
