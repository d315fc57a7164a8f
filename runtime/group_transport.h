// SPDX-License-Identifier: Apache-2.0
// What a group is created on: the transport that its ranks choose, the windows and rails of that, and the backend on them. This
// is the one place that knows which transports a build has.
#pragma once

#include <memory>
#include <string>

#include "runtime/backend.h"
#include "runtime/config.h"
#include "runtime/group_context.h"
#include "runtime/layout/window_layout.h"
#include "transport/control/control_connection.h"
#include "transport/exchange.h"
#include "transport/rails.h"
#include "transport/topology/rank_place.h"

namespace epx {

struct TransportChoice {
  epx_transport transport; // never AUTO
  std::string why;
};

// The call is collective. `auto` becomes nccl when each rank has an NCCL that epx can use, and a GPU that is new enough for the
// kernels and that no other rank of its host has. `some_want_auto`: this group, or another one of the bootstrap, wants auto.
TransportChoice choose_transport(epx_transport wanted, bool some_want_auto, Exchange& exchange);

// Returns where this rank is. On transport host this makes no call of CUDA.
RankPlace find_place(epx_transport transport);

struct GroupTransport {
  MultiNodeTransport of; // without rails where the group needs none
  int rail_ctas;         // SMs that transfers by rail take at most
  WindowLayout layout;   // of the windows of a node; the same on all ranks
};

// The call is collective; all ranks succeed or all throw.
GroupTransport open_transport(epx_transport kind, const GroupShape& shape, int rank, const epx_group_config& config,
                              Exchange& exchange);

// The call is collective; all ranks succeed or all throw. The context must outlive the backend. `control` is NULL in a group of
// one node.
std::unique_ptr<Backend> make_backend(const GroupContext& context, int num_comm_sms, GroupTransport transport,
                                      std::unique_ptr<ControlConnection> control, Exchange& exchange);

} // namespace epx
