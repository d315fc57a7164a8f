// SPDX-License-Identifier: Apache-2.0
// A GroupRun is one rank of a group under test: it creates the group, checks epx_group_query, and counts the calls and the
// events that epx_group_status must report.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "epx/epx.hpp"
#include "tests/support/call_buffers.h"
#include "tests/support/case.h"
#include "tests/support/device.h"

namespace epx::test {

// RankContext is what a test needs to run as one rank.
struct RankContext {
  int rank = 0; // in the bootstrap
  int num_ranks = 1;
  const epx_bootstrap* bootstrap = nullptr;
  Device* device = nullptr;

  // Gathers every rank's `value` in rank order; it is also a barrier. Throws CheckFailure when a rank does not come.
  std::vector<uint64_t> gather(uint64_t value) const;
};

class GroupRun {
public:
  // Collective. expected_rank: where color and key must have put this rank; by default its rank in the bootstrap.
  GroupRun(const RankContext& context, const GroupCase& group, int color = 0, int key = 0,
           std::optional<int> expected_rank = {});
  GroupRun(const GroupRun&) = delete;
  GroupRun& operator=(const GroupRun&) = delete;
  ~GroupRun(); // destroys the group; aborts it first when a check has failed, so that peers fail soon too

  const GroupCase& shape() const { return shape_; }
  epx_group handle() const { return group_.get(); }
  GroupView view() const { return group_; }
  const epx_group_info& info() const { return info_; }
  int rank() const { return info_.rank; }
  Device& device() const { return device_; }
  std::vector<Arena>& arenas() { return arenas_; }

  void add_arena(int64_t bytes); // collective: epx_mem_alloc
  void free_arena(size_t index); // collective: epx_mem_free

  void count_call() { ++calls_; }

  // Records that the last counted call must have reported so many events; none when count is 0.
  void expect_event(epx_event_kind kind, epx_operation operation, int64_t count);

  // Reads the status (which clears the events), compares it with what was expected, and expects nothing from then on.
  void check_status();

private:
  void check_info(const epx_group_config& config, int expected_rank) const;
  void check_plan(const epx_group_config& config) const;

  GroupCase shape_;
  Device& device_;
  Group group_;
  epx_group_info info_ = {};
  std::vector<Arena> arenas_;
  std::vector<Memory> arena_memory_; // by arena
  uint64_t calls_ = 0;

  struct FirstEvent {
    epx_event_kind kind;
    epx_operation operation;
    uint64_t sequence;
  };
  std::array<uint64_t, EPX_MAX_EVENT_KINDS> events_{};
  std::optional<FirstEvent> first_event_;
};

} // namespace epx::test
