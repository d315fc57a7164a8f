// SPDX-License-Identifier: Apache-2.0
// What the exchanges that are made of slices have in common: the calls by which rows move, and the local permutation around them.
#pragma once

#include "epx/epx.hpp"
#include "epx/epx_moe.h"
#include "moe/block/call.h"
#include "moe/block/group.h"
#include "moe/block/layout.h"
#include "moe/block/tables.h"

namespace epx::moe {

// Integer arrays of `count` slices in the memory of a call.
class SliceTensors {
public:
  SliceTensors(int64_t count, Carver& memory)
      : input_offsets_(memory.take(EPX_INT32, {count})), send_sizes_(memory.take(EPX_INT32, {count})),
        output_offsets_(memory.take(EPX_INT32, {count})), recv_sizes_(memory.take(EPX_INT32, {count})) {}

  SliceArrays arrays() const {
    const auto data = [](const Tensor& tensor) { return static_cast<int32_t*>(tensor.data()); };
    return {data(input_offsets_), data(send_sizes_), data(output_offsets_), data(recv_sizes_)};
  }

  void move(epx_group group, epx_stream stream, const epx_tensor& operand, const epx_tensor& output,
            epx_slice_direction direction = EPX_SLICES_FORWARD) const {
    epx_ragged_all_to_all_args args{};
    args.struct_size = sizeof(args);
    args.stream = stream;
    args.operand = &operand;
    args.output = &output;
    args.input_offsets = input_offsets_.get();
    args.send_sizes = send_sizes_.get();
    args.output_offsets = output_offsets_.get();
    args.recv_sizes = recv_sizes_.get();
    args.direction = direction;
    throw_if_failed(epx_ragged_all_to_all(group, &args));
  }

private:
  Tensor input_offsets_, send_sizes_, output_offsets_, recv_sizes_;
};

// The first `rows` rows of a tensor.
inline Tensor first_rows(const Tensor& tensor, int64_t rows) {
  return {tensor.data(), tensor.dtype(), {rows, tensor.size(1)}};
}

// The local permutation by a row map; see epx_moe.h. Nothing reads rows that no route has.
class Permutation {
public:
  Permutation(const CallPlace& place, const Tensor& row_map) : place_(place), row_map_(row_map) {}

  // Weights may be NULL, as in the next one.
  void permute(const epx_tensor* tokens, const epx_tensor* topk_weights, const epx_tensor* rows,
               const epx_tensor* row_weights) const {
    auto args = place_.make_args<epx_moe_permute_args>();
    args.row_map = row_map_.get();
    args.tokens = tokens;
    args.topk_weights = topk_weights;
    args.rows = rows;
    args.row_weights = row_weights;
    args.pads = EPX_PADS_UNTOUCHED;
    throw_if_failed(epx_moe_permute(&args));
  }
  // tokens[t] = the sum of its rows.
  void sum(const epx_tensor* rows, const epx_tensor* row_weights, const epx_tensor* tokens,
           const epx_tensor* topk_weights) const {
    auto args = place_.make_args<epx_moe_permute_bwd_args>();
    args.row_map = row_map_.get();
    args.grad_rows = rows;
    args.grad_row_weights = row_weights;
    args.grad_tokens = tokens;
    args.grad_topk_weights = topk_weights;
    throw_if_failed(epx_moe_permute_bwd(&args));
  }

private:
  const CallPlace& place_;
  const Tensor& row_map_;
};

// Sorts routes by expert, into `row_map` and the zones.
inline void sort_routes(const CallPlace& place, const Tensor& topk_idx, int32_t alignment, const epx_tensor* counts,
                        const epx_tensor* offsets, const Tensor& row_map) {
  auto args = place.make_args<epx_moe_row_map_args>();
  args.topk_idx = topk_idx.get();
  args.alignment = alignment;
  args.counts = counts;
  args.offsets = offsets;
  args.row_map = row_map.get();
  throw_if_failed(epx_moe_row_map(&args));
}

} // namespace epx::moe
