// SPDX-License-Identifier: Apache-2.0
// Gather moves rows from slots to their tokens' home ranks and sums them.
#pragma once

#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/stages.h"

namespace epx::host {

void combine(HostGroup& group, const CombineCall& call);
void dispatch_bwd(HostGroup& group, const DispatchBwdCall& call);

} // namespace epx::host
