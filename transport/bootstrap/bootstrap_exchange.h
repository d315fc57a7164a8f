// SPDX-License-Identifier: Apache-2.0
// BootstrapExchange gathers records through the caller's epx_bootstrap while a group is created.
#pragma once

#include <utility>
#include <vector>

#include "epx/epx.h"
#include "transport/exchange.h"

namespace epx {

// All ranks of the bootstrap are members at first; set_members narrows them to one group once the groups are known. A failure
// of any rank of the bootstrap, member or not, fails all of them, so that none waits for one that has left. A rank that has
// failed throws its own error even where its peers do not come to be told.
class BootstrapExchange : public Exchange {
public:
  // `bootstrap` must outlive the exchange.
  BootstrapExchange(const epx_bootstrap& bootstrap, int64_t timeout_ms) : bootstrap_(bootstrap), timeout_ms_(timeout_ms) {
    for (int rank = 0; rank < bootstrap.num_ranks; ++rank)
      members_.push_back(rank);
  }

  // `members` are ranks of the bootstrap, in the order of the group.
  void set_members(std::vector<int> members) { members_ = std::move(members); }

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override {
    mine.rank = bootstrap_.rank;
    std::vector<ExchangeRecord> world(static_cast<size_t>(bootstrap_.num_ranks));
    char message[EPX_MAX_MESSAGE_BYTES] = "";
    const epx_status status = bootstrap_.all_gather(bootstrap_.context, &mine, world.data(), sizeof(ExchangeRecord),
                                                    timeout_ms_, message, sizeof(message));
    message[sizeof(message) - 1] = '\0';
    if (status != EPX_SUCCESS && mine.status != EPX_SUCCESS) throw StatusError(mine.status, mine.message);
    if (status != EPX_SUCCESS)
      fail(status, "creating the group: {}", message[0] != '\0' ? message : "the bootstrap's all_gather failed");
    std::vector<ExchangeRecord> group;
    throw_peer_failure(mine, world);
    for (const int member : members_)
      group.push_back(world[static_cast<size_t>(member)]);
    for (const ExchangeRecord& record : world)
      group.front().refuses |= record.refuses;
    return group;
  }

private:
  const epx_bootstrap& bootstrap_;
  int64_t timeout_ms_;
  std::vector<int> members_;
};

} // namespace epx
