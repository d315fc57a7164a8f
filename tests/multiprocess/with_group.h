// SPDX-License-Identifier: Apache-2.0
// Groups of kRanks threads on the host transport, for tests of the calls on one.
#pragma once

#include <functional>

#include "epx/epx.hpp"
#include "tests/multiprocess/layer_round.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"

namespace epx::test {

// Runs `body` on both ranks of a fresh group.
inline void with_group(const epx_group_config& config, const std::function<void(epx_group, int rank)>& body) {
  LocalMeeting meeting(kRanks);
  run_threads(kRanks, [&](int rank) {
    const Group group(meeting.bootstrap(rank), config);
    body(group.get(), rank);
  });
}

} // namespace epx::test
