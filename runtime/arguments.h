// SPDX-License-Identifier: Apache-2.0
// The arguments of the operations are checked here and turned into the calls of runtime/stages/stages.h. What is refused
// throws INVALID_ARGUMENT, or UNSUPPORTED for rank-major calls of a group of several nodes, before anything has happened.
#pragma once

#include <cstdint>
#include <vector>

#include "base/operations.h"
#include "epx/epx.h"
#include "runtime/group_context.h"
#include "runtime/stages/stages.h"

namespace epx {

#define EPX_CHECK(NUMBER, name, first_bytes, Call, ...)                                                                    \
  Call check(const GroupContext& context, const epx_##name##_args& args);
EPX_OPERATIONS(EPX_CHECK)
#undef EPX_CHECK

// What epx_load_of_counts reads: routes from each rank to each expert, [P, E].
std::vector<int64_t> check_counts(const GroupContext& context, const epx_layer& layer, const epx_tensor& global_counts);

// Throws when `pointer` is NULL.
void require_pointer(const char* function, const char* name, const void* pointer);

} // namespace epx
