// SPDX-License-Identifier: Apache-2.0
// The planner counts every byte of a group before anything is allocated.
#pragma once

#include "epx/epx.h"
#include "runtime/config.h"

namespace epx {

// Without its struct_size. The plan for `auto` is that of nccl, which takes more than host.
epx_memory_plan plan_memory(const GroupShape& shape, epx_transport transport);

} // namespace epx
