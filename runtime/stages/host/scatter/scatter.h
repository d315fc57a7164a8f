// SPDX-License-Identifier: Apache-2.0
// Scatter moves rows from tokens to slots.
#pragma once

#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/stages.h"

namespace epx::host {

void dispatch(HostGroup& group, const DispatchCall& call);
void prepare_dispatch(HostGroup& group, const PrepareDispatchCall& call);
void combine_bwd(HostGroup& group, const CombineBwdCall& call);

} // namespace epx::host
