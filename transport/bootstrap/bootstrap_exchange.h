// SPDX-License-Identifier: Apache-2.0
// BootstrapExchange gathers records through the caller's epx_bootstrap while a group is created.
#pragma once

#include <utility>
#include <vector>

#include "epx/epx.h"
#include "transport/exchange.h"

namespace epx {

inline constexpr int32_t kLibraryVersion = EPX_VERSION_MAJOR * 10000 + EPX_VERSION_MINOR * 100 + EPX_VERSION_PATCH;

// All ranks of the bootstrap are members at first; set_members narrows them to one group once the groups are known. A failure
// of any rank of the bootstrap, member or not, fails all of them, so that none waits for one that has left. A rank that has
// failed throws its own error even where its peers do not come to be told.
// The caller's all_gather is not trusted: what it returns for each rank must be that rank's record of this all-gather. Anything
// else is INVALID_ARGUMENT, with the rank and what is wrong. A rank that finds it tells the others in the next all-gather.
class BootstrapExchange : public Exchange {
public:
  // `bootstrap` must outlive the exchange.
  BootstrapExchange(const epx_bootstrap& bootstrap, int64_t timeout_ms) : bootstrap_(bootstrap), timeout_ms_(timeout_ms) {
    for (int rank = 0; rank < bootstrap.num_ranks; ++rank)
      members_.push_back(rank);
  }

  // `members` are ranks of the bootstrap, in the order of the group.
  void set_members(std::vector<int> members) { members_ = std::move(members); }

  // Runs `body`, a step of the creation that `name` names in the log, and returns what it returns. Behind let_steps_differ() the
  // groups of the bootstrap may make different numbers of exchanges in a step, or none: a rank that is done with it stands by
  // until all ranks are.
  template <typename Body>
  auto step(const char* name, Body&& body) {
    const uint32_t first_round = round_;
    auto result = body();
    if (steps_differ_) stand_by();
    log_step(name, first_round);
    return result;
  }
  // All ranks of the bootstrap call this between the same two steps.
  void let_steps_differ() { steps_differ_ = true; }

  // Takes part in all-gathers, without a record of its own, until one in which all ranks of the bootstrap stand by. That comes:
  // each all-gather is bounded, and so is the number that any group's step makes.
  void stand_by();

  // Tells the other ranks that this one has failed outside an exchange; they learn it in theirs.
  void tell_peers(const StatusError& failure) noexcept;

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override;

private:
  // Gathers the records of all ranks of the bootstrap, and throws as gather() does.
  std::vector<ExchangeRecord> gather_sound_world(ExchangeRecord mine);
  void log_step(const char* name, uint32_t first_round) const;
  std::vector<ExchangeRecord> gather_world(ExchangeRecord mine, int64_t timeout_ms);
  void require_sound(const std::vector<ExchangeRecord>& world, uint32_t round) const;

  const epx_bootstrap& bootstrap_;
  int64_t timeout_ms_;
  uint32_t round_ = 0; // all-gathers that have been made
  std::vector<int> members_;
  bool steps_differ_ = false;
};

} // namespace epx
