// SPDX-License-Identifier: Apache-2.0
// What the router's calls check of their arguments. Each function throws with the names and values.
#pragma once

#include <cstdint>

#include "epx/epx_moe.h"
#include "moe/router/router.h"
#include "moe/tensors.h"

namespace epx::moe {

void require_config(const epx_moe_router_config* config);

// Checks logits[T, E] and returns T.
int64_t require_logits(const epx_tensor* logits, const epx_moe_router_config& config, Place place);

// The type of the computation, and of what epx_moe.h calls real.
epx_dtype real_of(const epx_tensor& logits, Place place);

// Checks the shape of a topk_idx that a caller gives back.
void require_selection_shape(const epx_tensor* topk_idx, const epx_moe_router_config& config, int64_t num_tokens);
// Checks on the host that it is what the router could have written. Kernels look at it themselves.
void require_selection(const epx_tensor& topk_idx, const epx_moe_router_config& config);

// Checks the shape [P, E].
void require_counts(const epx_tensor* global_counts, int32_t num_experts);
// Sums up counts whose shape has been checked, on the host.
ExpertLoad load_of(const epx_tensor& global_counts, int32_t num_experts);

} // namespace epx::moe
