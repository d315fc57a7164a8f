// SPDX-License-Identifier: Apache-2.0
// A LayerMemory says where the tensors of one layer lie on one rank, and makes the calls of that layer with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "epx/epx.hpp"

namespace epx::test {

// The memory is the owner's, on the host or on a device. An optional tensor that is NULL is not passed. The calls of the two
// layouts need an object each, for a plan each.
struct LayerMemory {
  Layer layer;
  std::span<std::byte> handle_mem;
  epx_stream stream = nullptr;

  epx_dtype dtype = EPX_FLOAT32;
  epx_dtype index_dtype = EPX_INT32; // of topk_idx and recv_topk_idx; counts and offsets are int32
  int64_t num_tokens = 0;            // T
  int64_t hidden = 0;                // H
  int64_t num_rows = 0;              // N
  int64_t num_local_experts = 0;     // E_l
  int64_t zone_stride = 0;           // of prepare
  int64_t num_ranks = 0;             // P, for the rank-major layout only, as the next
  int64_t rows_per_source = 0;       // M
  epx_row_spacing row_spacing = EPX_ROWS_STRIDED;
  int64_t sidecar_bytes = 0; // of a row; 0: none travels

  // Of the calls that move rows, whose receive rows have a dtype of their own where it is set; and of those that add rows up.
  const epx_row_format *format = nullptr, *sum_format = nullptr;
  epx_dtype recv_dtype = EPX_DTYPE_UNSET;

  std::byte *topk_idx = nullptr, *counts = nullptr, *offsets = nullptr; // rank-major counts are [P]
  std::byte *tokens = nullptr, *sidecar = nullptr, *topk_weights = nullptr;
  std::byte *recv_tokens = nullptr, *recv_sidecar = nullptr, *recv_weights = nullptr, *recv_topk_idx = nullptr;
  // What combine reads and writes.
  std::byte *expert_out = nullptr, *expert_weights = nullptr, *out = nullptr;
  // What combine_bwd reads and writes.
  std::byte *grad_out = nullptr, *bwd_expert_out = nullptr, *bwd_weights = nullptr;
  std::byte *grad_expert_out = nullptr, *grad_recv_weights = nullptr;
  // What dispatch_bwd reads and writes.
  std::byte *grad_recv = nullptr, *grad_weights = nullptr, *grad_tokens = nullptr, *grad_topk_weights = nullptr;

  // The arguments of each operation; prepare and prepare_dispatch have no optional outputs.
  PrepareArgs prepare() const;
  DispatchArgs dispatch() const;
  PrepareDispatchArgs prepare_dispatch() const;
  CombineArgs combine() const;
  CombineBwdArgs combine_bwd() const;
  DispatchBwdArgs dispatch_bwd() const;
  DispatchRankMajorArgs dispatch_rank_major() const;
  CombineRankMajorArgs combine_rank_major() const;
  CombineRankMajorBwdArgs combine_rank_major_bwd() const;
  DispatchRankMajorBwdArgs dispatch_rank_major_bwd() const;

  // Makes one of these calls. Throws Error when it fails.
  void call(GroupView group, epx_operation operation) const;
  // The same, but returns the status; epx_last_error() has the sentence.
  epx_status try_call(GroupView group, epx_operation operation) const;

private:
  template <typename Args>
  Args begin() const {
    return {.layer = layer, .handle_mem = handle_mem, .stream = stream};
  }
  template <typename Args>
  void pass_plan(Args& args) const; // of prepare
  template <typename Args>
  void pass_rows(Args& args) const; // of dispatch
  static Tensor tensor(std::byte* data, epx_dtype dtype, Shape shape);
  static RowFormat format_of(const epx_row_format* given) { return given != nullptr ? RowFormat(*given) : RowFormat(); }
  epx_dtype dtype_of_recv() const { return recv_dtype == EPX_DTYPE_UNSET ? dtype : recv_dtype; }
  Tensor token_rows(std::byte* data) const { return tensor(data, dtype, {num_tokens, hidden}); }
  Tensor slot_rows(std::byte* data) const { return slot_rows(data, dtype); }
  Tensor slot_rows(std::byte* data, epx_dtype type) const { return tensor(data, type, {num_rows, hidden}); }
  Tensor token_floats(std::byte* data) const { return tensor(data, EPX_FLOAT32, {num_tokens, layer.top_k}); }
  Tensor slot_floats(std::byte* data) const { return tensor(data, EPX_FLOAT32, num_rows); }
  Tensor source_rows(std::byte* data) const { return source_rows(data, dtype); }
  Tensor source_rows(std::byte* data, epx_dtype type) const {
    return tensor(data, type, {num_ranks, rows_per_source, hidden});
  }
  Tensor source_routes(std::byte* data, epx_dtype type) const {
    return tensor(data, type, {num_ranks, rows_per_source, layer.top_k});
  }
};

} // namespace epx::test
