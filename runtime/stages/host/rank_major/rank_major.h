// SPDX-License-Identifier: Apache-2.0
// dispatch_rank_major sends each token once to each rank that it goes to, and makes the plan that the other rank-major calls
// follow. Those are the movements of the expert-major layout on this plan, but for the weights' gradients, which are here.
#pragma once

#include "runtime/stages/host/movement.h"
#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/stages.h"

namespace epx::host {

// dispatch_rank_major_bwd: each rank stores `weights` [P, M, K] of the routes that it received into the staging of their home
// ranks, ...
void send_rank_major_weights_home(const Movement& movement, const float* weights);
// ... which read them there: `out` is [T, K].
void collect_rank_major_weights(const Movement& movement, float* out);

} // namespace epx::host
