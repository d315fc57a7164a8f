// SPDX-License-Identifier: Apache-2.0
// ep_bench times these, each a line of its table: the operations of a layout, and on GPUs a variant, sequences and
// prepare_dispatch.
#pragma once

#include <array>
#include <span>

#include "epx/epx.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

struct Line {
  const char* name;
  epx_operation operation;          // the expert-major one, in both layouts; EPX_OP_NONE: all up to combine in a row
  bool has_weight_gradients = true; // whether combine_bwd computes them
  bool is_followed_by_combine = false;

  bool moves_rows() const {
    return operation != EPX_OP_PREPARE && operation != EPX_OP_NONE && operation != EPX_OP_PREPARE_DISPATCH;
  } // whether it moves the rows of one operation
};

inline constexpr int kNumOperations = 5; // the first lines are one operation each
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

// The rank-major layout has no prepare, and its combine_bwd no weight gradients.
inline constexpr int kNumRankMajorOperations = 4;
inline constexpr std::array<Line, 5> kRankMajorLines{{
    {"dispatch", EPX_OP_DISPATCH},
    {"combine", EPX_OP_COMBINE},
    {"combine_bwd", EPX_OP_COMBINE_BWD, false},
    {"dispatch_bwd", EPX_OP_DISPATCH_BWD},
    {"dispatch+combine", EPX_OP_NONE},
}};

// Returns the lines that are one operation each. They come first in lines_of().
inline std::span<const Line> operations_of(Layout layout) {
  return is_rank_major(layout) ? std::span<const Line>(kRankMajorLines).first(kNumRankMajorOperations)
                               : std::span<const Line>(kLines).first(kNumOperations);
}

inline std::span<const Line> lines_of(const Options& options) {
  if (options.transport != EPX_TRANSPORT_NCCL) return operations_of(options.layout);
  return is_rank_major(options.layout) ? std::span<const Line>(kRankMajorLines) : std::span<const Line>(kLines);
}

} // namespace epx::bench
