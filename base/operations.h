// SPDX-License-Identifier: Apache-2.0
// The table of the operations. What follows of an operation from one line of it is made by macros that are given to
// EPX_OPERATIONS: its name, the size of its args, its function of the C API and the declaration of the check of its args.
#pragma once

#include <algorithm>

#include "epx/epx.h"

// X(NUMBER, name, first_bytes, Call, stage): epx_<name>() takes epx_<name>_args, of which the first version had `first_bytes`
// bytes, and is EPX_OP_<NUMBER> in reports; check() (runtime/arguments.h) makes a Call of the args, and Stages::<stage>
// (runtime/stages/stages.h) makes that. These operations of a layer have a stage of their own, which has their name.
#define EPX_LAYER_STAGES(X)                                                                                                \
  X(PREPARE, prepare, 96, PrepareCall, prepare)                                                                            \
  X(DISPATCH, dispatch, 72, DispatchCall, dispatch)                                                                        \
  X(PREPARE_DISPATCH, prepare_dispatch, 136, PrepareDispatchCall, prepare_dispatch)                                        \
  X(COMBINE, combine, 64, CombineCall, combine)                                                                            \
  X(COMBINE_BWD, combine_bwd, 80, CombineBwdCall, combine_bwd)                                                             \
  X(DISPATCH_BWD, dispatch_bwd, 72, DispatchBwdCall, dispatch_bwd)                                                         \
  X(DISPATCH_RANK_MAJOR, dispatch_rank_major, 96, DispatchRankMajorCall, dispatch_rank_major)

// All operations of a layer: those, and the ones that the stage of another makes, to which Call::operation says which it is.
#define EPX_LAYER_OPERATIONS(X)                                                                                            \
  EPX_LAYER_STAGES(X)                                                                                                      \
  X(COMBINE_RANK_MAJOR, combine_rank_major, 56, CombineCall, combine)                                                      \
  X(COMBINE_RANK_MAJOR_BWD, combine_rank_major_bwd, 56, CombineBwdCall, combine_bwd)                                       \
  X(DISPATCH_RANK_MAJOR_BWD, dispatch_rank_major_bwd, 72, DispatchBwdCall, dispatch_bwd)

// The operation without a layer, and with it all stages and all operations.
#define EPX_RAGGED_ALL_TO_ALL(X) X(RAGGED_ALL_TO_ALL, ragged_all_to_all, 72, RaggedAllToAllCall, ragged_all_to_all)
#define EPX_STAGES(X) EPX_LAYER_STAGES(X) EPX_RAGGED_ALL_TO_ALL(X)
#define EPX_OPERATIONS(X) EPX_LAYER_OPERATIONS(X) EPX_RAGGED_ALL_TO_ALL(X)

// X(NUMBER, name): the other calls that have a sequence number; they have no args struct and no kernel.
#define EPX_HOST_CALLS(X)                                                                                                  \
  X(MEM_ALLOC, mem_alloc)                                                                                                  \
  X(MEM_FREE, mem_free)                                                                                                    \
  X(ALL_GATHER, all_gather)

namespace epx {

// Of an args struct: the operation's number, and its function as error sentences name it.
template <typename Args>
struct OperationOf;
#define EPX_OPERATION_OF(NUMBER, name, ...)                                                                                \
  template <>                                                                                                              \
  struct OperationOf<epx_##name##_args> {                                                                                  \
    static constexpr epx_operation kNumber = EPX_OP_##NUMBER;                                                              \
    static constexpr const char* kFunction = "epx_" #name;                                                                 \
  };
EPX_OPERATIONS(EPX_OPERATION_OF)
#undef EPX_OPERATION_OF

#define EPX_NUMBER(NUMBER, ...) int{EPX_OP_##NUMBER},
constexpr auto kLastOperation = // the largest number of one
    static_cast<epx_operation>(std::max({EPX_OPERATIONS(EPX_NUMBER) EPX_HOST_CALLS(EPX_NUMBER) int{EPX_OP_NONE}}));
#undef EPX_NUMBER

constexpr bool is_host_call(epx_operation operation) {
#define EPX_IS(NUMBER, ...) operation == EPX_OP_##NUMBER ||
  return EPX_HOST_CALLS(EPX_IS) false;
#undef EPX_IS
}

} // namespace epx
