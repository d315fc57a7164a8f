// SPDX-License-Identifier: Apache-2.0
// ep_bench times these, each a line of its table: the five operations, and on GPUs a variant, sequences and
// prepare_dispatch.
#pragma once

#include <array>
#include <span>

#include "epx/epx.h"

namespace epx::bench {

inline constexpr std::array kOperations{EPX_OP_PREPARE, EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD,
                                        EPX_OP_DISPATCH_BWD};
inline constexpr int kNumOperations = kOperations.size();

struct Line {
  const char* name;
  epx_operation operation;          // EPX_OP_NONE: prepare, dispatch and combine in a row
  bool has_weight_gradients = true; // whether combine_bwd computes them
  bool is_followed_by_combine = false;

  bool moves_rows() const {
    return operation != EPX_OP_PREPARE && operation != EPX_OP_NONE && operation != EPX_OP_PREPARE_DISPATCH;
  } // whether it moves the rows of one operation
};

inline constexpr std::array<Line, 9> kLines{{
    {"prepare", EPX_OP_PREPARE},
    {"dispatch", EPX_OP_DISPATCH},
    {"combine", EPX_OP_COMBINE},
    {"combine_bwd", EPX_OP_COMBINE_BWD},
    {"dispatch_bwd", EPX_OP_DISPATCH_BWD},
    {"combine_bwd-nograd", EPX_OP_COMBINE_BWD, false},
    {"prepare+dispatch+combine", EPX_OP_NONE},
    {"prepare_dispatch", EPX_OP_PREPARE_DISPATCH},
    {"prepare_dispatch+combine", EPX_OP_PREPARE_DISPATCH, true, true},
}};

// The first kNumOperations are those of kOperations, in their order.
inline std::span<const Line> lines_of(epx_transport transport) {
  return transport == EPX_TRANSPORT_NCCL ? std::span<const Line>(kLines)
                                         : std::span<const Line>(kLines).first(kNumOperations);
}

} // namespace epx::bench
