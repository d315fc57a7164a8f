// SPDX-License-Identifier: Apache-2.0
// The host backend runs a group on shared memory.
#pragma once

#include <memory>

#include "runtime/backend.h"
#include "runtime/group_context.h"
#include "transport/control/control_connection.h"
#include "transport/exchange.h"
#include "transport/transport.h"

namespace epx::host {

// The call is collective over `exchange`; all ranks succeed or all throw. The context must outlive the backend. `control` is
// that of a group of several nodes; else NULL.
std::unique_ptr<Backend> make_backend(const GroupContext& context, std::unique_ptr<Transport> transport,
                                      std::unique_ptr<ControlConnection> control, Exchange& exchange);

} // namespace epx::host
