// SPDX-License-Identifier: Apache-2.0
// The planner computes what epx_group_memory_plan reports: the window, handle memory, and the scratch memory that grows with
// the group's dimensions. It allocates nothing.
#pragma once

#include "epx/epx.h"
#include "runtime/config.h"

namespace epx {

// Returns the plan with struct_size 0, which the C API sets. For EPX_TRANSPORT_AUTO it is the plan of nccl, which takes more
// memory than host.
epx_memory_plan plan_memory(const GroupShape& shape, epx_transport transport);

} // namespace epx
