// SPDX-License-Identifier: Apache-2.0
// Every backend implements these operations, which are behind the C API. Their arguments have been checked: shapes fit the
// group, and required pointers are not NULL.
//
// There are two movements of a layer. *Scatter* carries rows from tokens to slots: dispatch and combine_bwd. *Gather* carries rows
// from slots to tokens and sums them: combine and dispatch_bwd. Weights and gradients are variations of these two.
//
// The rank-major layout has a plan of its own, which dispatch_rank_major makes. To the movements it is one in which each token
// has one route to a rank, so combine_rank_major is combine, and likewise backward (runtime/layout/rank_major.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/operations.h"
#include "epx/epx.h"
#include "runtime/config.h"
#include "runtime/formats/row_format.h"
#include "runtime/formats/scale_layout.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/layout/rank_major.h"

namespace epx {

struct PrepareCall {
  epx_stream stream; // NULL on the host
  int top_k;
  int alignment; // effective, >= 1
  std::byte* handle_mem;
  int64_t num_tokens;   // T
  const void* topk_idx; // [T, K] int32 or int64
  bool topk_idx_is_64;
  void* counts;        // [E_l] int32 or int64
  void* offsets;       // [E_l + 1], as counts
  void* global_counts; // [P, E], as counts; may be NULL
  bool counts_are_64;
  int64_t* info;        // [5]; may be NULL
  int32_t* slot;        // [T, K]; may be NULL
  int32_t* slot_origin; // [R, 3]; may be NULL
  int64_t zone_stride;  // Z; 0: zones follow each other
};

// The tensors that a row format has beside the rows of a scatter.
struct FormatTensors {
  const std::byte* scales = nullptr;   // [T, S]: rows come quantised; NULL: they are quantised in the call
  const float* row_scales = nullptr;   // [T]; NULL unless the format has row scales and rows come quantised
  const float* encode_scale = nullptr; // [1]; may be NULL
  std::byte* recv_scales = nullptr;    // in recv_layout; NULL: rows are dequantised where they land
  float* recv_row_scales = nullptr;    // [N]; NULL unless the format has row scales and rows arrive quantised
  bool come_on_wire = false; // rows come as WireRow, pitch() apart, and have no other tensors: a leg's, from another node
  ScaleLayout recv_layout;

  // Returns whether rows arrive quantised, with their scales.
  constexpr bool keep_codes() const { return recv_scales != nullptr; }
  // Returns whether the sender has nothing to quantise.
  constexpr bool come_quantised() const { return come_on_wire || scales != nullptr; }
  // Returns whether a row is quantised in the call, for all ranks alike: the sender's own gets what its peers get.
  constexpr bool quantise_for_all() const { return !come_quantised() && keep_codes(); }
};

// The data movements have these arguments in common.
struct MovementCall {
  epx_stream stream; // NULL on the host
  epx_operation operation;
  int top_k;
  int alignment; // effective, >= 1
  const std::byte* handle_mem;
  int64_t num_tokens;                     // T
  int64_t recv_rows;                      // N
  int hidden;                             // H
  epx_dtype dtype;                        // of what is read
  const std::byte* checked_header;        // handle_mem, or the copy of its header that launch_check makes for a kernel
  int64_t rows_per_source = kExpertMajor; // rank-major: M
  int64_t slots_per_source = 0;           // rank-major: slots of the plan for each source rank
  bool reports_events = true;             // a call that is made as several reports its events once
  const HandleLayout* layout = nullptr;   // of the plan in handle_mem; NULL: as in a group of one node. Not for kernels
  epx_dtype recv_dtype = EPX_DTYPE_UNSET; // of what is written; dtype where the format does not quantise
  WireFormat format;                      // of rows on their way

  constexpr bool is_rank_major() const { return rows_per_source != kExpertMajor; }
  // Returns how many slots the plan can have at most.
  constexpr int64_t num_slots(const GroupShape& shape) const {
    return is_rank_major() ? shape.num_ranks * slots_per_source : shape.max_recv_tokens;
  }
  // Returns the row of the receive tensors that a slot is, unless the plan is compact. Rank-major tensors may have more rows for
  // a source than it can have tokens.
  constexpr int64_t row_of_slot(int64_t slot) const {
    return !is_rank_major() || rows_per_source == slots_per_source
               ? slot
               : slot / slots_per_source * rows_per_source + slot % slots_per_source;
  }
};

// passed_weights() says which tensors of weights a movement has, as CallDescriptor::weights does.
struct DispatchCall : MovementCall {
  const std::byte* tokens; // [T, H]
  int64_t sidecar_bytes;   // per row; 0: none
  const std::byte* sidecar;
  const float* topk_weights; // [T, K]; may be NULL
  std::byte* recv_tokens;    // [N, H]
  std::byte* recv_sidecar;
  float* recv_weights; // [N]; NULL iff topk_weights is
  bool clears_pads;    // EPX_PADS_ZERO
  FormatTensors format_tensors;

  constexpr int32_t passed_weights() const { return topk_weights != nullptr ? 1 : 0; }
};

// Returns the bytes of a row that a scatter is given. Call has format_tensors.
template <typename Call>
constexpr int64_t input_row_bytes(const Call& call) {
  return call.format_tensors.come_on_wire ? WireRow(call.format, call.hidden).pitch() : row_bytes(call.dtype, call.hidden);
}

// dispatch reads the handle memory that prepare writes.
struct PrepareDispatchCall {
  PrepareCall prepare;
  DispatchCall dispatch;
};

// N is P * M; handle_mem is written, and checked_header is not used.
struct DispatchRankMajorCall : DispatchCall { // recv_weights is [P, M, K] here
  std::byte* plan;                            // handle_mem
  const void* topk_idx;                       // [T, K] int32 or int64
  bool topk_idx_is_64;
  void* recv_topk_idx; // [P, M, K] int32 or int64
  bool recv_topk_idx_is_64;
  void* counts; // [P] int32 or int64
  bool counts_are_64;
  bool is_compact; // EPX_ROWS_COMPACT
};

struct CombineCall : MovementCall {
  const std::byte* expert_out; // [N, H]
  const float* recv_weights;   // [N]; may be NULL
  std::byte* out;              // [T, H]; NULL: a leg's, whose sums nobody reads (GatherTensors)

  constexpr int32_t passed_weights() const { return recv_weights != nullptr ? 1 : 0; }
};

struct CombineBwdCall : MovementCall {
  const std::byte* grad_out;   // [T, H]
  const std::byte* expert_out; // [N, H]; NULL iff grad_recv_weights is
  const float* recv_weights;   // [N]; may be NULL
  std::byte* grad_expert_out;  // [N, H]
  float* grad_recv_weights;    // [N]; may be NULL
  epx_dtype expert_dtype;      // of expert_out; grad_out's, unless the call has a format
  FormatTensors format_tensors;

  constexpr int32_t passed_weights() const {
    return (recv_weights != nullptr ? 1 : 0) | (grad_recv_weights != nullptr ? 2 : 0);
  }
};

struct DispatchBwdCall : MovementCall {
  const std::byte* grad_recv;     // [N, H]
  const float* grad_recv_weights; // [N], rank-major [P, M, K]; may be NULL
  std::byte* grad_tokens;         // [T, H]; as CombineCall::out
  float* grad_topk_weights;       // [T, K]; NULL iff grad_recv_weights is

  constexpr int32_t passed_weights() const { return grad_recv_weights != nullptr ? 2 : 0; }
};

// Slices of rows, without a layer and without a plan. The integers are [K], and lie where the rows do.
struct RaggedAllToAllCall {
  epx_stream stream;    // NULL on the host
  int num_slices;       // K
  int64_t row_bytes;    // at most 2^31 - 1
  int64_t operand_rows; // N, below 2^31, as M
  int64_t output_rows;  // M
  const std::byte* operand;
  std::byte* output;
  const void* input_offsets;
  const void* send_sizes;
  const void* output_offsets;
  const void* recv_sizes;
  bool integers_are_64;
  bool is_transposed;
};

// The operation of a call, and the stream that it is made on.
struct CallHead {
  epx_operation operation;
  epx_stream stream;
};
constexpr CallHead head_of(const PrepareCall& call) {
  return {EPX_OP_PREPARE, call.stream};
}
constexpr CallHead head_of(const MovementCall& call) {
  return {call.operation, call.stream};
}
constexpr CallHead head_of(const PrepareDispatchCall& call) {
  return head_of(call.dispatch);
}
constexpr CallHead head_of(const RaggedAllToAllCall& call) {
  return {EPX_OP_RAGGED_ALL_TO_ALL, call.stream};
}

// The handle memory that a call writes its plan into. The other calls read a plan.
struct WrittenPlan {
  int top_k;
  std::byte* handle_mem;
};
constexpr WrittenPlan written_plan(const PrepareCall& call) {
  return {call.top_k, call.handle_mem};
}
constexpr WrittenPlan written_plan(const PrepareDispatchCall& call) {
  return written_plan(call.prepare);
}
constexpr WrittenPlan written_plan(const DispatchRankMajorCall& call) {
  return {call.top_k, call.plan};
}
template <typename Call>
concept WritesPlan = requires(const Call& call) {
  written_plan(call);
};

// combine, combine_bwd and dispatch_bwd serve both layouts; call.operation says which.
class Stages {
public:
  virtual ~Stages() = default;
#define EPX_STAGE(NUMBER, name, first_bytes, Call, stage) virtual void stage(const Call& call) = 0;
  EPX_STAGES(EPX_STAGE)
#undef EPX_STAGE
};

} // namespace epx
