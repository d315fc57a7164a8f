// Groups of kRanks threads on the host transport, for tests of the calls on one.
#pragma once

#include <functional>
#include <memory>

#include "epx/epx.h"
#include "tests/multiprocess/layer_round.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"

namespace epx::test {

struct GroupDelete {
  void operator()(epx_group group) const { epx_group_destroy(group); }
};
using GroupOwner = std::unique_ptr<epx_group_s, GroupDelete>;

inline GroupOwner make_group(LocalMeeting& meeting, int rank, const epx_group_config& config) {
  const epx_bootstrap bootstrap = meeting.bootstrap(rank);
  epx_group group = nullptr;
  check_ok(epx_group_create(&bootstrap, &config, &group), "epx_group_create");
  return GroupOwner(group);
}

// Runs `body` on both ranks of a fresh group.
inline void with_group(const epx_group_config& config, const std::function<void(epx_group, int rank)>& body) {
  LocalMeeting meeting(kRanks);
  run_threads(kRanks, [&](int rank) {
    const GroupOwner group = make_group(meeting, rank, config);
    body(group.get(), rank);
  });
}

} // namespace epx::test
