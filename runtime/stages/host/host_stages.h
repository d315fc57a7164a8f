// SPDX-License-Identifier: Apache-2.0
// The host stages run on shared memory: one thread per rank loops over rows and stores them into the peers' windows.
#pragma once

#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/stages.h"

namespace epx::host {

#define EPX_STAGE(NUMBER, name, first_bytes, Call, stage) void stage(HostGroup& group, const Call& call);
EPX_STAGES(EPX_STAGE)
#undef EPX_STAGE

class HostStages : public Stages {
public:
  // All arguments must outlive the stages.
  HostStages(const GroupContext& context, PeerWindow window, const Allocations& allocations, CallProtocol& protocol,
             StatusBoard& status)
      : group_(context, window, allocations, protocol, status) {}

#define EPX_STAGE(NUMBER, name, first_bytes, Call, stage)                                                                  \
  void stage(const Call& call) override {                                                                                  \
    host::stage(group_, call);                                                                                             \
  }
  EPX_STAGES(EPX_STAGE)
#undef EPX_STAGE

private:
  HostGroup group_;
};

} // namespace epx::host
