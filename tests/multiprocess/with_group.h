// SPDX-License-Identifier: Apache-2.0
// Tests of single calls get a group of kRanks threads on the host transport from here.
#pragma once

#include <functional>

#include "epx/epx.hpp"
#include "tests/multiprocess/layer_round.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"

namespace epx::test {

// Runs `body` on both ranks of a fresh group.
inline void with_group(const epx_group_config& config, const std::function<void(epx_group, int rank)>& body) {
  LocalRendezvous rendezvous(kRanks);
  run_threads(kRanks, [&](int rank) {
    const Group group(rendezvous.bootstrap(rank), config);
    body(group.get(), rank);
  });
}

} // namespace epx::test
