// SPDX-License-Identifier: Apache-2.0
// Measures the whole block beside the exchange, the native layer and the dense bound.
#pragma once

#include <span>

#include "tools/ep_bench/block/results.h"
#include "tools/ep_bench/exchange.h"
#include "tools/ep_bench/figures.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

// Takes the group and the tensors of the exchange, whose figures have the wire bounds where they were measured. With
// options.verify the layers' outputs are compared, with a dump directory they are written there. Collective.
BlockResults bench_block(Exchange& exchange, std::span<const InputSet> sets, const Figures& exchange_figures,
                         const Options& options, const Peers& peers, Memory& memory);

} // namespace epx::bench
