// SPDX-License-Identifier: Apache-2.0
// prepare gives each route its slot, and writes the plan into the handle memory.
#pragma once

#include <array>
#include <cstdint>

#include "runtime/layout/handle_memory.h"
#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/stages.h"

namespace epx::host {

// prepare in three steps: its caller begins the call before the first one, passes the entry barrier between the first two, and
// the exit barrier between the last two. The group and the call must outlive it.
class PrepareSteps {
public:
  PrepareSteps(HostGroup& group, const PrepareCall& call);

  void publish_counts();
  // Afterwards the handle memory has this rank's routes and zones.
  void assign_slots();
  // Completes the handle memory and the outputs, and reports.
  void deliver();

private:
  HostGroup& group_;
  const PrepareCall& call_;
  HandleLayout layout_;
  HandleWriter plan_;
  std::array<int64_t, 5> info_{};
};

} // namespace epx::host
