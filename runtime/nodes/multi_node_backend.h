// SPDX-License-Identifier: Apache-2.0
// The backend of a group of several nodes: NVLink inside each node, rails between them.
#pragma once

#include <memory>

#include "runtime/backend.h"
#include "runtime/group_context.h"
#include "transport/control/control_connection.h"
#include "transport/exchange.h"
#include "transport/rails.h"

namespace epx::cuda {

// This is collective over `exchange`, which has all ranks of the group: all ranks succeed or all throw. The context must
// outlive the backend; its layout is that of the node's window.
std::unique_ptr<Backend> make_multi_node_backend(const GroupContext& context, int num_comm_sms, int rail_ctas,
                                                 MultiNodeTransport transport, std::unique_ptr<ControlConnection> control,
                                                 Exchange& exchange);

} // namespace epx::cuda
