// SPDX-License-Identifier: Apache-2.0
// prepare gives each route its slot, and writes the plan into the handle memory.
#pragma once

#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/stages.h"

namespace epx::host {

void prepare(HostGroup& group, const PrepareCall& call);

} // namespace epx::host
