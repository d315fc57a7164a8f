// SPDX-License-Identifier: Apache-2.0
// The HostGroup is what every call of a group on the host transport works on.
#pragma once

#include "runtime/allocations.h"
#include "runtime/group_context.h"
#include "runtime/layout/host_scratch.h"
#include "runtime/layout/slots.h"
#include "runtime/stages/host/protocol/call_protocol.h"
#include "runtime/status_board.h"
#include "transport/peer_window.h"

namespace epx::host {

struct HostGroup {
  // The arguments that are references must outlive the HostGroup.
  HostGroup(const GroupContext& group_context, PeerWindow peer_window, const Allocations& group_allocations,
            CallProtocol& call_protocol, StatusBoard& status_board)
      : context(group_context), window(peer_window), allocations(group_allocations), protocol(call_protocol),
        status(status_board), experts{group_context.shape.num_experts, group_context.shape.num_ranks},
        scratch(group_context.shape) {}

  const GroupContext& context;
  PeerWindow window;
  const Allocations& allocations;
  CallProtocol& protocol;
  StatusBoard& status;
  ExpertBlocks experts;
  Scratch scratch;
};

} // namespace epx::host
