// SPDX-License-Identifier: Apache-2.0
// The sizes of what a group of several nodes has on GPUs beside the node's window: memory that only this rank's kernels and the
// rails access.
#pragma once

#include <cstdint>

#include "base/checked_math.h"
#include "base/dtypes.h"
#include "runtime/layout/multi_node_shape.h"
#include "runtime/layout/window_layout.h"

namespace epx {

// What all ranks must pass alike in a call. Inside a node the descriptors of the legs are compared, and between nodes these
// are. They travel as words.
struct AgreedFields {
  int32_t operation;
  int32_t top_k;
  int32_t alignment;       // effective
  int32_t zone_stride = 0; // of prepare
  // Of a movement, as in CallDescriptor; 0 in prepare.
  int32_t hidden = 0;
  int32_t dtype = 0;
  int32_t recv_dtype = 0;
  int32_t scaling = 0;
  int32_t element_dtype = 0;
  int32_t scale_dtype = 0;
  uint32_t amax_floor = 0;
  int32_t weights = 0;
  int32_t sidecar_bytes = 0;
  int32_t has_fixed_sizes = 0; // 1: rows travel in fixed sizes; all ranks or none capture the call

  constexpr bool operator==(const AgreedFields&) const = default;
};
// Between the two forms of these fields.
constexpr AgreedFields agreed_fields(const CallDescriptor& call, bool has_fixed_sizes) {
  return {.operation = call.operation,
          .top_k = call.top_k,
          .alignment = call.alignment,
          .hidden = call.hidden,
          .dtype = call.dtype,
          .recv_dtype = call.recv_dtype,
          .scaling = call.scaling,
          .element_dtype = call.element_dtype,
          .scale_dtype = call.scale_dtype,
          .amax_floor = call.amax_floor,
          .weights = call.weights,
          .sidecar_bytes = call.sidecar_bytes,
          .has_fixed_sizes = has_fixed_sizes ? 1 : 0};
}
constexpr CallDescriptor descriptor_with(const AgreedFields& fields) {
  CallDescriptor call{};
  call.operation = static_cast<uint8_t>(fields.operation);
  call.top_k = static_cast<uint8_t>(fields.top_k);
  call.alignment = fields.alignment;
  call.subject = fields.zone_stride;
  call.hidden = fields.hidden;
  call.dtype = static_cast<uint8_t>(fields.dtype);
  call.recv_dtype = static_cast<uint8_t>(fields.recv_dtype);
  call.scaling = static_cast<uint8_t>(fields.scaling);
  call.element_dtype = static_cast<uint8_t>(fields.element_dtype);
  call.scale_dtype = static_cast<uint8_t>(fields.scale_dtype);
  call.amax_floor = fields.amax_floor;
  call.weights = static_cast<uint8_t>(fields.weights);
  call.sidecar_bytes = fields.sidecar_bytes;
  return call;
}
constexpr int kAgreedWords = sizeof(AgreedFields) / sizeof(int32_t);

// Whether prepare may drop routes of tokens that rails have no room for (fixed_rail_tokens).
constexpr bool may_drop_beyond_rails(const GroupShape& group) {
  return group.max_rail_tokens() < group.max_tokens_per_rank;
}
// In prepare each rank contributes to an all-gather int32 [E + kAgreedWords]: its routes to each expert, and its AgreedFields;
// and behind them, where rails may have no room, [E]: the routes to each expert that are dropped for that, which are in no
// slot.
constexpr int64_t beyond_rails_word(const GroupShape& group) {
  return int64_t{group.num_experts} + kAgreedWords;
}
constexpr int64_t count_words(const GroupShape& group) {
  return beyond_rails_word(group) + (may_drop_beyond_rails(group) ? group.num_experts : 0);
}

// In prepare this rank sends its rail peer on each other node a table of the tokens that go there: int32 number of tokens,
// three zeros, and for each token int32 [1 + 2 K]: its number, and of each k the slot and the index of the owner in that node,
// or -1, -1 for a k that does not go there or was dropped. Beyond the number of tokens a table has anything. Tables have room
// for the largest K of the group and travel whole, so that ranks that do not pass the same K still send what the others expect.
constexpr int kTableHeaderWords = 4;
constexpr int64_t table_words(const MultiNodeShape& shape) {
  return kTableHeaderWords + shape.padded_tokens() * (1 + 2 * int64_t{shape.group.max_top_k});
}

// In each movement this rank first sends its rail peer on each node such a record, int32 [3 + kAgreedWords + chunks]: the id of
// its plan (two words; 0: it takes part without routes), the number of its tokens that go to that node, its AgreedFields, and,
// for each chunk, how many rows come home of the tokens up to its end.
constexpr int kRecordAgreedWord = 3;
constexpr int kRecordHeaderWords = kRecordAgreedWord + kAgreedWords;
constexpr int64_t record_words(const MultiNodeShape& shape) {
  return kRecordHeaderWords + shape.num_chunks();
}

// Returns the bytes from one row of a call to the next beside the rails. A quantised row travels as WireRow.
constexpr int64_t rail_row_bytes(const WireFormat& format, epx_dtype dtype, int64_t hidden) {
  return format.is_quantised() ? WireRow(format, hidden).pitch() : row_bytes(dtype, hidden);
}

// Rows of one direction with their weights and sidecars, of all nodes; see RailArea in
// runtime/nodes/multi_node_kernels.h.
struct RailRowsLayout {
  int64_t node_rows;      // of one node
  int64_t node_weights;   // floats of one node
  int64_t all_rows_bytes; // of all nodes
  int64_t all_weights_bytes;
  int64_t total_bytes;
};

// Throws StatusError when the sizes cannot be represented.
inline RailRowsLayout make_rail_rows_layout(const MultiNodeShape& shape) {
  const char* what = "the rows beside the rails";
  const GroupShape& group = shape.group;
  RailRowsLayout layout{};
  layout.node_rows = checked_mul(shape.padded_tokens(), shape.max_back_rows(group.max_top_k), what);
  layout.node_weights = checked_mul(shape.padded_tokens(), group.max_top_k, what);
  const auto of_all_nodes = [&](int64_t elements, int64_t bytes_each) {
    const int64_t bytes = checked_mul(checked_mul(elements, shape.num_nodes(), what), bytes_each, what);
    layout.total_bytes = checked_add(layout.total_bytes, checked_round_up(bytes, kRegionAlignment, what), what);
    return checked_round_up(bytes, kRegionAlignment, what);
  };
  layout.all_rows_bytes = of_all_nodes(layout.node_rows, staged_row_stride(group, what));
  layout.all_weights_bytes = of_all_nodes(layout.node_weights, sizeof(float));
  of_all_nodes(shape.padded_tokens(), group.max_sidecar_bytes);
  return layout;
}

// Rows to and from the rails, and prepare's tables of both directions.
inline int64_t rail_bytes(const MultiNodeShape& shape) {
  const char* what = "the rows beside the rails";
  const int64_t words = checked_mul(shape.num_nodes(), table_words(shape), what);
  return checked_mul(
      2, checked_add(make_rail_rows_layout(shape).total_bytes, checked_mul(words, sizeof(int32_t), what), what), what);
}

} // namespace epx
