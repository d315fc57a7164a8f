// SPDX-License-Identifier: Apache-2.0
// The host stages run on shared memory: one thread per rank loops over rows and stores them into the peers' windows.
#pragma once

#include "runtime/stages/host/gather/gather.h"
#include "runtime/stages/host/prepare/prepare.h"
#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/host/rank_major/rank_major.h"
#include "runtime/stages/host/scatter/scatter.h"
#include "runtime/stages/stages.h"

namespace epx::host {

class HostStages : public Stages {
public:
  // All arguments must outlive the stages.
  HostStages(const GroupContext& context, PeerWindow window, const Allocations& allocations, CallProtocol& protocol,
             StatusBoard& status)
      : group_(context, window, allocations, protocol, status) {}

  void prepare(const PrepareCall& call) override { host::prepare(group_, call); }
  void dispatch(const DispatchCall& call) override { host::dispatch(group_, call); }
  void prepare_dispatch(const PrepareDispatchCall& call) override { host::prepare_dispatch(group_, call); }
  void dispatch_rank_major(const DispatchRankMajorCall& call) override { host::dispatch_rank_major(group_, call); }
  void combine(const CombineCall& call) override { host::combine(group_, call); }
  void combine_bwd(const CombineBwdCall& call) override { host::combine_bwd(group_, call); }
  void dispatch_bwd(const DispatchBwdCall& call) override { host::dispatch_bwd(group_, call); }

private:
  HostGroup group_;
};

} // namespace epx::host
