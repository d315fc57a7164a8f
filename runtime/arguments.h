// SPDX-License-Identifier: Apache-2.0
// The arguments of the operations are checked here and turned into the calls of runtime/stages/stages.h. What is refused
// throws INVALID_ARGUMENT, or UNSUPPORTED for rank-major calls of a group of several nodes, before anything has happened.
#pragma once

#include "epx/epx.h"
#include "runtime/group_context.h"
#include "runtime/stages/stages.h"

namespace epx {

// Returns the effective alignment. Throws when the layer does not fit the group.
int require_layer(const GroupContext& context, const epx_layer& layer, const char* function);

PrepareCall check(const GroupContext& context, const epx_prepare_args& args);
DispatchCall check(const GroupContext& context, const epx_dispatch_args& args);
PrepareDispatchCall check(const GroupContext& context, const epx_prepare_dispatch_args& args);
CombineCall check(const GroupContext& context, const epx_combine_args& args);
CombineBwdCall check(const GroupContext& context, const epx_combine_bwd_args& args);
DispatchBwdCall check(const GroupContext& context, const epx_dispatch_bwd_args& args);
DispatchRankMajorCall check(const GroupContext& context, const epx_dispatch_rank_major_args& args);
CombineCall check(const GroupContext& context, const epx_combine_rank_major_args& args);
CombineBwdCall check(const GroupContext& context, const epx_combine_rank_major_bwd_args& args);
DispatchBwdCall check(const GroupContext& context, const epx_dispatch_rank_major_bwd_args& args);

// Throws when `pointer` is NULL.
void require_pointer(const char* function, const char* name, const void* pointer);

} // namespace epx
