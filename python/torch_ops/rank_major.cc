// SPDX-License-Identifier: Apache-2.0
// The rank-major operations as operators of PyTorch. They are functional, but for the one that writes into a tensor of the
// caller's.
#include <array>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "calls.h"
#include "row_major.h"
#include "rows.h"

namespace epx_torch {
namespace {

using std::optional;
using std::tuple;

constexpr int64_t kNoAlignment = 1; // the layout has no zones

epx_tensor view_ranks(const char* name, const Tensor& rows, const Group& group) {
  return view(name, rows, group.place, {group.info.num_ranks, kAnySize, kAnySize}, kRowDtypes);
}

// Returns handle_mem, recv_topk_idx, recv_weights and counts.
tuple<Tensor, Tensor, Tensor, Tensor> dispatch_to(const Group& group, const epx_tensor& sent, const Tensor& topk_idx,
                                                  const optional<Tensor>& topk_weights, bool compact,
                                                  const epx_tensor& recv_tokens, const epx_row_format* format = nullptr) {
  const Place& place = group.place;
  const epx_tensor indices = view("topk_idx", topk_idx, place, {sent.sizes[0], kAnySize}, kIndexDtypes);
  const int64_t top_k = indices.sizes[1], num_ranks = group.info.num_ranks, max_rows = recv_tokens.sizes[1];
  auto args = make_args<epx_dispatch_rank_major_args>(group, top_k, kNoAlignment);
  epx_tensor weights = {}, row_weights = {};
  if (topk_weights) weights = view("topk_weights", *topk_weights, place, {sent.sizes[0], top_k}, kFloat);
  Tensor recv_topk_idx = new_tensor(place, {num_ranks, max_rows, top_k}, ScalarType::Int);
  Tensor recv_weights = topk_weights ? new_tensor(place, {num_ranks, max_rows, top_k}, ScalarType::Float) : nothing(group);
  // The library leaves rows at or beyond counts alone. An index that memory held could be out of range, and a weight not a
  // number, whose product with a gradient of zero is none either.
  torch::stable::fill_(recv_topk_idx, -1);
  torch::stable::zero_(recv_weights);
  tuple outputs(new_handle_mem(group, args), recv_topk_idx, recv_weights, new_tensor(place, {num_ranks}, ScalarType::Int));
  const epx_tensor row_indices = view_of_new(recv_topk_idx), counts = view_of_new(std::get<3>(outputs));
  args.tokens = &sent;
  args.topk_idx = &indices;
  args.recv_tokens = &recv_tokens;
  args.recv_topk_idx = &row_indices;
  args.counts = &counts;
  args.format = format;
  args.row_spacing = compact ? EPX_ROWS_COMPACT : EPX_ROWS_STRIDED;
  if (topk_weights) {
    row_weights = view_of_new(recv_weights);
    args.topk_weights = &weights;
    args.recv_weights = &row_weights;
  }
  throw_if_failed(epx_dispatch_rank_major(group.group, &args));
  return outputs;
}

std::array<int64_t, 2> lead_of(const Group& group, int64_t max_rows) {
  return {group.info.num_ranks, require_count("max_rows", max_rows)};
}

tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dispatch_rank_major(int64_t id, const Tensor& tokens, const Tensor& topk_idx,
                                                                  const optional<Tensor>& topk_weights, bool compact,
                                                                  int64_t max_rows) {
  const GroupUse group(id);
  const Rows rows = new_rows(*group, tokens, lead_of(*group, max_rows));
  return std::tuple_cat(std::make_tuple(rows.recv_tokens),
                        dispatch_to(*group, rows.sent, topk_idx, topk_weights, compact, rows.received));
}

tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
dispatch_rank_major_sidecar(int64_t id, const Tensor& tokens, const Tensor& topk_idx, const optional<Tensor>& topk_weights,
                            bool compact, int64_t max_rows, const Tensor& sidecar) {
  const GroupUse group(id);
  Rows rows = new_rows(*group, tokens, lead_of(*group, max_rows));
  const Tensor recv_sidecar = attach(*group, rows, sidecar);
  return std::tuple_cat(std::make_tuple(rows.recv_tokens),
                        dispatch_to(*group, rows.sent, topk_idx, topk_weights, compact, rows.received),
                        std::make_tuple(recv_sidecar));
}

// With a row format. Optional results, the last three, are empty where they are not there: scales, row_scales, sidecar.
tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
dispatch_rank_major_format(int64_t id, const Tensor& tokens, const Tensor& topk_idx, const optional<Tensor>& topk_weights,
                           bool compact, int64_t max_rows, const std::vector<int64_t>& format, double amax_floor,
                           const optional<Tensor>& scales, const optional<Tensor>& row_scales,
                           const optional<Tensor>& encode_scale, const optional<Tensor>& sidecar) {
  const GroupUse group(id);
  FormatRows rows(*group, tokens, lead_of(*group, max_rows), {format, amax_floor, scales, row_scales, encode_scale});
  const Tensor recv_sidecar = attach(*group, rows, sidecar);
  return std::tuple_cat(std::make_tuple(rows.recv_tokens),
                        dispatch_to(*group, rows.sent, topk_idx, topk_weights, compact, rows.received, rows.format()),
                        std::make_tuple(rows.recv_scales, rows.recv_row_scales, recv_sidecar));
}

// Writes the rows into a tensor of the caller's, in memory that peers reach for instance, and a sidecar into another one.
tuple<Tensor, Tensor, Tensor, Tensor> dispatch_rank_major_into(int64_t id, const Tensor& tokens, const Tensor& topk_idx,
                                                               const optional<Tensor>& topk_weights, bool compact,
                                                               const Tensor& recv_tokens, const optional<Tensor>& sidecar,
                                                               const optional<Tensor>& recv_sidecar) {
  const GroupUse group(id);
  epx_tensor sent = view_tokens(tokens, *group);
  epx_tensor rows = view("recv_tokens", recv_tokens, group->place, {group->info.num_ranks, kAnySize, tokens.size(1)},
                         {tokens.scalar_type()});
  if (sidecar) attach_sidecar(*group, sent, *sidecar, rows, recv_sidecar.value());
  return dispatch_to(*group, sent, topk_idx, topk_weights, compact, rows);
}

// Here and below `format` is as in combine.
Tensor combine_rank_major(int64_t id, const Tensor& handle_mem, const Tensor& expert_out, int64_t top_k, int64_t num_tokens,
                          const std::vector<int64_t>& format, double amax_floor) {
  const GroupUse group(id);
  auto args = make_args<epx_combine_rank_major_args>(*group, top_k, kNoAlignment, handle_mem);
  const epx_tensor rows = view_ranks("expert_out", expert_out, *group);
  Tensor out = new_tensor(group->place, {num_tokens, rows.sizes[2]}, expert_out.scalar_type());
  const epx_tensor out_view = view_of_new(out);
  args.expert_out = &rows;
  args.out = &out_view;
  const WireFormat on_wire(format, amax_floor);
  args.format = on_wire.get();
  throw_if_failed(epx_combine_rank_major(group->group, &args));
  return out;
}

Tensor combine_rank_major_bwd(int64_t id, const Tensor& handle_mem, const Tensor& grad_out, int64_t top_k, int64_t max_rows,
                              const std::vector<int64_t>& format, double amax_floor) {
  const GroupUse group(id);
  auto args = make_args<epx_combine_rank_major_bwd_args>(*group, top_k, kNoAlignment, handle_mem);
  const epx_tensor grad = view_rows("grad_out", grad_out, *group);
  Tensor rows = new_tensor(group->place, {group->info.num_ranks, max_rows, grad.sizes[1]}, grad_out.scalar_type());
  const epx_tensor grad_rows = view_of_new(rows);
  args.grad_out = &grad;
  args.grad_expert_out = &grad_rows;
  const WireFormat on_wire(format, amax_floor);
  args.format = on_wire.get();
  throw_if_failed(epx_combine_rank_major_bwd(group->group, &args));
  return rows;
}

tuple<Tensor, Tensor> dispatch_rank_major_bwd(int64_t id, const Tensor& handle_mem, const Tensor& grad_recv,
                                              const optional<Tensor>& grad_recv_weights, int64_t top_k, int64_t num_tokens,
                                              const std::vector<int64_t>& format, double amax_floor) {
  const GroupUse group(id);
  auto args = make_args<epx_dispatch_rank_major_bwd_args>(*group, top_k, kNoAlignment, handle_mem);
  const epx_tensor rows = view_ranks("grad_recv", grad_recv, *group);
  tuple outputs(new_tensor(group->place, {num_tokens, rows.sizes[2]}, grad_recv.scalar_type()),
                grad_recv_weights ? new_tensor(group->place, {num_tokens, top_k}, ScalarType::Float) : nothing(*group));
  const epx_tensor grad_tokens = view_of_new(std::get<0>(outputs));
  args.grad_recv = &rows;
  args.grad_tokens = &grad_tokens;
  epx_tensor row_weights, grad_weights;
  if (grad_recv_weights) {
    row_weights =
        view("grad_recv_weights", *grad_recv_weights, group->place, {rows.sizes[0], rows.sizes[1], top_k}, kFloat);
    grad_weights = view_of_new(std::get<1>(outputs));
    args.grad_recv_weights = &row_weights;
    args.grad_topk_weights = &grad_weights;
  }
  const WireFormat on_wire(format, amax_floor);
  args.format = on_wire.get();
  throw_if_failed(epx_dispatch_rank_major_bwd(group->group, &args));
  return outputs;
}

} // namespace
} // namespace epx_torch

STABLE_TORCH_LIBRARY_FRAGMENT(epx, library) {
  library.def(
      "dispatch_rank_major(int group, Tensor tokens, Tensor topk_idx, Tensor? topk_weights, bool compact, SymInt max_rows) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("dispatch_rank_major_into(int group, Tensor tokens, Tensor topk_idx, Tensor? topk_weights, bool compact, "
              "Tensor(a!) recv_tokens, Tensor? sidecar, Tensor(b!)? recv_sidecar) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("dispatch_rank_major_sidecar(int group, Tensor tokens, Tensor topk_idx, Tensor? topk_weights, bool compact, "
              "SymInt max_rows, "
              "Tensor sidecar) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("dispatch_rank_major_format(int group, Tensor tokens, Tensor topk_idx, Tensor? topk_weights, bool compact, "
              "SymInt max_rows, "
              "int[] format, float amax_floor, Tensor? scales, Tensor? row_scales, Tensor? encode_scale, Tensor? sidecar) "
              "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "combine_rank_major(int group, Tensor handle_mem, Tensor expert_out, int top_k, SymInt num_tokens, int[] format=[], "
      "float amax_floor=0) -> Tensor");
  library.def("combine_rank_major_bwd(int group, Tensor handle_mem, Tensor grad_out, int top_k, SymInt max_rows, int[] "
              "format=[], float amax_floor=0) -> Tensor");
  library.def("dispatch_rank_major_bwd(int group, Tensor handle_mem, Tensor grad_recv, Tensor? grad_recv_weights, "
              "int top_k, SymInt num_tokens, int[] format=[], float amax_floor=0) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(epx, CompositeExplicitAutograd, library) {
  library.impl("dispatch_rank_major", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::dispatch_rank_major>::call));
  library.impl("dispatch_rank_major_sidecar",
               TORCH_BOX(&epx_torch::RowMajor<&epx_torch::dispatch_rank_major_sidecar>::call));
  library.impl("dispatch_rank_major_format", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::dispatch_rank_major_format>::call));
  library.impl("dispatch_rank_major_into", TORCH_BOX(&epx_torch::dispatch_rank_major_into));
  library.impl("combine_rank_major", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::combine_rank_major>::call));
  library.impl("combine_rank_major_bwd", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::combine_rank_major_bwd>::call));
  library.impl("dispatch_rank_major_bwd", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::dispatch_rank_major_bwd>::call));
}
