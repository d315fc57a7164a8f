// SPDX-License-Identifier: Apache-2.0
// The five operations as operators of PyTorch. Those that move rows are functional; python/epx/torch gives them fake kernels,
// gradients and the effect that keeps torch.compile from merging, dropping or reordering them.
#include <array>
#include <tuple>
#include <vector>

#include "calls.h"
#include "row_major.h"
#include "rows.h"

namespace epx_torch {
namespace {

using std::optional;
using std::tuple;

constexpr int64_t kNumInfo = 5;

// Of a call by expert.
std::array<int64_t, 1> lead_of(int64_t num_rows) {
  return {require_count("num_rows", num_rows)};
}

epx_pads pads_of(int64_t pads) {
  return static_cast<epx_pads>(to_int32("pads", pads)); // the library refuses what is none
}

// What a call that makes a plan writes beside handle memory, in one tensor, since each tensor costs the host an allocation: info,
// counts, offsets, and global_counts.
struct PlanOutputs {
  PlanOutputs(const Place& place, const epx_group_info& group, bool int64_counts) {
    const ScalarType dtype = int64_counts ? ScalarType::Long : ScalarType::Int;
    const int64_t size = int64_counts ? sizeof(int64_t) : sizeof(int32_t), num_local = group.num_local_experts,
                  num_all = int64_t{group.num_ranks} * group.num_experts;
    const int64_t first_count = kNumInfo * static_cast<int64_t>(sizeof(int64_t)) / size;
    results = new_tensor(place, {first_count + 2 * num_local + 1 + num_all}, dtype);
    info_ = view_of_part(results, 0, {kNumInfo}, ScalarType::Long);
    counts_ = view_of_part(results, first_count * size, {num_local}, dtype);
    offsets_ = view_of_part(results, (first_count + num_local) * size, {num_local + 1}, dtype);
    global_counts_ =
        view_of_part(results, (first_count + 2 * num_local + 1) * size, {group.num_ranks, group.num_experts}, dtype);
  }

  // The args are of use as long as this object lives.
  template <typename Args>
  void point(Args& args) const {
    args.counts = &counts_;
    args.offsets = &offsets_;
    args.global_counts = &global_counts_;
    args.info = &info_;
  }

  Tensor results;

private:
  epx_tensor counts_, offsets_, global_counts_, info_;
};

tuple<Tensor, Tensor> prepare(int64_t id, const Tensor& topk_idx, int64_t alignment, bool int64_counts,
                              int64_t zone_stride) {
  const GroupUse group(id);
  const epx_tensor indices = view("topk_idx", topk_idx, group->place, {kAnySize, kAnySize}, kIndexDtypes);
  auto args = make_args<epx_prepare_args>(*group, indices.sizes[1], alignment);
  const Tensor handle_mem = new_handle_mem(*group, args);
  const PlanOutputs plan(group->place, group->info, int64_counts);
  plan.point(args);
  args.topk_idx = &indices;
  args.zone_stride = zone_stride;
  throw_if_failed(epx_prepare(group->group, &args));
  return {handle_mem, plan.results};
}

// Makes the call with these args, and returns recv_weights.
template <typename Args, typename Function>
Tensor move_rows(const Group& group, Function function, Args& args, const Rows& rows, const optional<Tensor>& topk_weights,
                 int64_t pads, const epx_row_format* format) {
  epx_tensor weights = {}, row_weights = {};
  if (topk_weights)
    weights = view("topk_weights", *topk_weights, group.place, {rows.sent.sizes[0], args.layer.top_k}, kFloat);
  Tensor recv_weights =
      topk_weights ? new_tensor(group.place, {rows.received.sizes[0]}, ScalarType::Float) : nothing(group);
  args.tokens = &rows.sent;
  args.recv_tokens = &rows.received;
  args.pads = pads_of(pads);
  args.format = format;
  if (topk_weights) {
    row_weights = view_of_new(recv_weights);
    args.topk_weights = &weights;
    args.recv_weights = &row_weights;
  }
  throw_if_failed(function(group.group, &args));
  return recv_weights;
}

Tensor dispatch_rows(const Group& group, const Tensor& handle_mem, const Rows& rows, const optional<Tensor>& topk_weights,
                     int64_t top_k, int64_t alignment, int64_t pads, const epx_row_format* format = nullptr) {
  auto args = make_args<epx_dispatch_args>(group, top_k, alignment, handle_mem);
  return move_rows(group, epx_dispatch, args, rows, topk_weights, pads, format);
}

tuple<Tensor, Tensor> dispatch(int64_t id, const Tensor& handle_mem, const Tensor& tokens,
                               const optional<Tensor>& topk_weights, int64_t top_k, int64_t alignment, int64_t pads,
                               int64_t num_rows) {
  const GroupUse group(id);
  const Rows rows = new_rows(*group, tokens, lead_of(num_rows));
  return {rows.recv_tokens, dispatch_rows(*group, handle_mem, rows, topk_weights, top_k, alignment, pads)};
}

// The operators with a sidecar are others, since each tensor that an operator returns costs the host time.
tuple<Tensor, Tensor, Tensor> dispatch_sidecar(int64_t id, const Tensor& handle_mem, const Tensor& tokens,
                                               const optional<Tensor>& topk_weights, int64_t top_k, int64_t alignment,
                                               int64_t pads, int64_t num_rows, const Tensor& sidecar) {
  const GroupUse group(id);
  Rows rows = new_rows(*group, tokens, lead_of(num_rows));
  const Tensor recv_sidecar = attach(*group, rows, sidecar);
  return {rows.recv_tokens, dispatch_rows(*group, handle_mem, rows, topk_weights, top_k, alignment, pads), recv_sidecar};
}

// Those with a row format. Optional results, the last three, are empty where they are not there: scales, row_scales, sidecar.
tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
dispatch_format(int64_t id, const Tensor& handle_mem, const Tensor& tokens, const optional<Tensor>& topk_weights,
                int64_t top_k, int64_t alignment, int64_t pads, int64_t num_rows, const std::vector<int64_t>& format,
                double amax_floor, const optional<Tensor>& scales, const optional<Tensor>& row_scales,
                const optional<Tensor>& encode_scale, const optional<Tensor>& sidecar) {
  const GroupUse group(id);
  FormatRows rows(*group, tokens, lead_of(num_rows), {format, amax_floor, scales, row_scales, encode_scale});
  const Tensor recv_sidecar = attach(*group, rows, sidecar);
  const Tensor recv_weights = dispatch_rows(*group, handle_mem, rows, topk_weights, top_k, alignment, pads, rows.format());
  return {rows.recv_tokens, recv_weights, rows.recv_scales, rows.recv_row_scales, recv_sidecar};
}

// Writes the rows into a tensor of the caller's, in memory that peers reach for instance, and a sidecar into another one. Returns
// recv_weights.
Tensor dispatch_into(int64_t id, const Tensor& handle_mem, const Tensor& tokens, const optional<Tensor>& topk_weights,
                     int64_t top_k, int64_t alignment, int64_t pads, const Tensor& recv_tokens,
                     const optional<Tensor>& sidecar, const optional<Tensor>& recv_sidecar) {
  const GroupUse group(id);
  Rows rows = {view_tokens(tokens, *group), recv_tokens,
               view("recv_tokens", recv_tokens, group->place, {kAnySize, tokens.size(1)}, {tokens.scalar_type()})};
  if (sidecar) attach_sidecar(*group, rows.sent, *sidecar, rows.received, recv_sidecar.value());
  return dispatch_rows(*group, handle_mem, rows, topk_weights, top_k, alignment, pads);
}

// Returns what prepare does, and recv_weights.
tuple<Tensor, Tensor, Tensor> prepare_dispatch_rows(const Group& group, const Rows& rows, const Tensor& topk_idx,
                                                    const optional<Tensor>& topk_weights, int64_t alignment,
                                                    bool int64_counts, int64_t zone_stride, int64_t pads,
                                                    const epx_row_format* format = nullptr) {
  const epx_tensor indices = view("topk_idx", topk_idx, group.place, {rows.sent.sizes[0], kAnySize}, kIndexDtypes);
  auto args = make_args<epx_prepare_dispatch_args>(group, indices.sizes[1], alignment);
  const Tensor handle_mem = new_handle_mem(group, args);
  const PlanOutputs plan(group.place, group.info, int64_counts);
  plan.point(args);
  args.topk_idx = &indices;
  args.zone_stride = zone_stride;
  return {handle_mem, plan.results, move_rows(group, epx_prepare_dispatch, args, rows, topk_weights, pads, format)};
}

// Returns what prepare does and then what dispatch does.
tuple<Tensor, Tensor, Tensor, Tensor> prepare_dispatch(int64_t id, const Tensor& tokens, const Tensor& topk_idx,
                                                       const optional<Tensor>& topk_weights, int64_t alignment,
                                                       bool int64_counts, int64_t zone_stride, int64_t pads,
                                                       int64_t num_rows) {
  const GroupUse group(id);
  const Rows rows = new_rows(*group, tokens, lead_of(num_rows));
  const auto [handle_mem, results, recv_weights] =
      prepare_dispatch_rows(*group, rows, topk_idx, topk_weights, alignment, int64_counts, zone_stride, pads);
  return {handle_mem, results, rows.recv_tokens, recv_weights};
}

tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
prepare_dispatch_sidecar(int64_t id, const Tensor& tokens, const Tensor& topk_idx, const optional<Tensor>& topk_weights,
                         int64_t alignment, bool int64_counts, int64_t zone_stride, int64_t pads, int64_t num_rows,
                         const Tensor& sidecar) {
  const GroupUse group(id);
  Rows rows = new_rows(*group, tokens, lead_of(num_rows));
  const Tensor recv_sidecar = attach(*group, rows, sidecar);
  const auto [handle_mem, results, recv_weights] =
      prepare_dispatch_rows(*group, rows, topk_idx, topk_weights, alignment, int64_counts, zone_stride, pads);
  return {handle_mem, results, rows.recv_tokens, recv_weights, recv_sidecar};
}

tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
prepare_dispatch_format(int64_t id, const Tensor& tokens, const Tensor& topk_idx, const optional<Tensor>& topk_weights,
                        int64_t alignment, bool int64_counts, int64_t zone_stride, int64_t pads, int64_t num_rows,
                        const std::vector<int64_t>& format, double amax_floor, const optional<Tensor>& scales,
                        const optional<Tensor>& row_scales, const optional<Tensor>& encode_scale,
                        const optional<Tensor>& sidecar) {
  const GroupUse group(id);
  FormatRows rows(*group, tokens, lead_of(num_rows), {format, amax_floor, scales, row_scales, encode_scale});
  const Tensor recv_sidecar = attach(*group, rows, sidecar);
  const auto [handle_mem, results, recv_weights] = prepare_dispatch_rows(*group, rows, topk_idx, topk_weights, alignment,
                                                                         int64_counts, zone_stride, pads, rows.format());
  return {handle_mem, results, rows.recv_tokens, recv_weights, rows.recv_scales, rows.recv_row_scales, recv_sidecar};
}

// Here and below `format` says how the wire alone is quantised; empty: not at all.
Tensor combine(int64_t id, const Tensor& handle_mem, const Tensor& expert_out, const optional<Tensor>& recv_weights,
               int64_t top_k, int64_t alignment, int64_t num_tokens, const std::vector<int64_t>& format,
               double amax_floor) {
  const GroupUse group(id);
  auto args = make_args<epx_combine_args>(*group, top_k, alignment, handle_mem);
  const epx_tensor rows = view_rows("expert_out", expert_out, *group);
  epx_tensor weights;
  if (recv_weights) {
    weights = view_weights("recv_weights", *recv_weights, *group, rows.sizes[0]);
    args.recv_weights = &weights;
  }
  Tensor out = new_tensor(group->place, {num_tokens, rows.sizes[1]}, expert_out.scalar_type());
  const epx_tensor out_view = view_of_new(out);
  args.expert_out = &rows;
  args.out = &out_view;
  const WireFormat on_wire(format, amax_floor);
  args.format = on_wire.get();
  throw_if_failed(epx_combine(group->group, &args));
  return out;
}

tuple<Tensor, Tensor> combine_bwd(int64_t id, const Tensor& handle_mem, const Tensor& grad_out,
                                  const optional<Tensor>& expert_out, const optional<Tensor>& recv_weights, int64_t top_k,
                                  int64_t alignment, int64_t num_rows, const std::vector<int64_t>& format,
                                  double amax_floor) {
  const GroupUse group(id);
  auto args = make_args<epx_combine_bwd_args>(*group, top_k, alignment, handle_mem);
  const epx_tensor grad = view_rows("grad_out", grad_out, *group);
  tuple outputs(new_tensor(group->place, {num_rows, grad.sizes[1]}, grad_out.scalar_type()),
                expert_out ? new_tensor(group->place, {num_rows}, ScalarType::Float) : nothing(*group));
  const epx_tensor grad_rows = view_of_new(std::get<0>(outputs));
  args.grad_out = &grad;
  args.grad_expert_out = &grad_rows;
  epx_tensor rows, weights, grad_weights;
  if (expert_out) {
    rows = view("expert_out", *expert_out, group->place, {num_rows, grad.sizes[1]}, {grad_out.scalar_type()});
    grad_weights = view_of_new(std::get<1>(outputs));
    args.expert_out = &rows;
    args.grad_recv_weights = &grad_weights;
  }
  if (recv_weights) {
    weights = view_weights("recv_weights", *recv_weights, *group, num_rows);
    args.recv_weights = &weights;
  }
  const WireFormat on_wire(format, amax_floor);
  args.format = on_wire.get();
  throw_if_failed(epx_combine_bwd(group->group, &args));
  return outputs;
}

tuple<Tensor, Tensor> dispatch_bwd(int64_t id, const Tensor& handle_mem, const Tensor& grad_recv,
                                   const optional<Tensor>& grad_recv_weights, int64_t top_k, int64_t alignment,
                                   int64_t num_tokens, const std::vector<int64_t>& format, double amax_floor) {
  const GroupUse group(id);
  auto args = make_args<epx_dispatch_bwd_args>(*group, top_k, alignment, handle_mem);
  const epx_tensor rows = view_rows("grad_recv", grad_recv, *group);
  tuple outputs(new_tensor(group->place, {num_tokens, rows.sizes[1]}, grad_recv.scalar_type()),
                grad_recv_weights ? new_tensor(group->place, {num_tokens, top_k}, ScalarType::Float) : nothing(*group));
  const epx_tensor grad_tokens = view_of_new(std::get<0>(outputs));
  args.grad_recv = &rows;
  args.grad_tokens = &grad_tokens;
  epx_tensor row_weights, grad_weights;
  if (grad_recv_weights) {
    row_weights = view_weights("grad_recv_weights", *grad_recv_weights, *group, rows.sizes[0]);
    grad_weights = view_of_new(std::get<1>(outputs));
    args.grad_recv_weights = &row_weights;
    args.grad_topk_weights = &grad_weights;
  }
  const WireFormat on_wire(format, amax_floor);
  args.format = on_wire.get();
  throw_if_failed(epx_dispatch_bwd(group->group, &args));
  return outputs;
}

} // namespace
} // namespace epx_torch

STABLE_TORCH_LIBRARY_FRAGMENT(epx, library) {
  library.def("prepare(int group, Tensor topk_idx, int alignment, bool int64_counts, "
              "int zone_stride=0) -> (Tensor, Tensor)");
  library.def("dispatch(int group, Tensor handle_mem, Tensor tokens, Tensor? topk_weights, int top_k, int alignment, "
              "int pads, SymInt num_rows) -> (Tensor, Tensor)");
  library.def("dispatch_into(int group, Tensor handle_mem, Tensor tokens, Tensor? topk_weights, int top_k, int alignment, "
              "int pads, Tensor(a!) recv_tokens, Tensor? sidecar, Tensor(b!)? recv_sidecar) -> Tensor");
  library.def(
      "dispatch_sidecar(int group, Tensor handle_mem, Tensor tokens, Tensor? topk_weights, int top_k, int alignment, "
      "int pads, SymInt num_rows, Tensor sidecar) -> (Tensor, Tensor, Tensor)");
  library.def("prepare_dispatch_sidecar(int group, Tensor tokens, Tensor topk_idx, Tensor? topk_weights, int alignment, "
              "bool int64_counts, int zone_stride, int pads, SymInt num_rows, Tensor sidecar) -> (Tensor, Tensor, Tensor, "
              "Tensor, Tensor)");
  library.def(
      "prepare_dispatch(int group, Tensor tokens, Tensor topk_idx, Tensor? topk_weights, int alignment, bool int64_counts, "
      "int zone_stride, int pads, SymInt num_rows) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "dispatch_format(int group, Tensor handle_mem, Tensor tokens, Tensor? topk_weights, int top_k, "
      "int alignment, int pads, SymInt num_rows, int[] format, float amax_floor, Tensor? scales, Tensor? row_scales, "
      "Tensor? encode_scale, Tensor? sidecar) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "prepare_dispatch_format(int group, Tensor tokens, Tensor topk_idx, Tensor? topk_weights, int alignment, "
      "bool int64_counts, int zone_stride, int pads, SymInt num_rows, int[] format, float amax_floor, Tensor? scales, "
      "Tensor? row_scales, Tensor? encode_scale, Tensor? sidecar) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("combine(int group, Tensor handle_mem, Tensor expert_out, Tensor? recv_weights, int top_k, int alignment, "
              "SymInt num_tokens, int[] format=[], float amax_floor=0) -> Tensor");
  library.def(
      "combine_bwd(int group, Tensor handle_mem, Tensor grad_out, Tensor? expert_out, Tensor? recv_weights, int top_k, "
      "int alignment, SymInt num_rows, int[] format=[], float amax_floor=0) -> (Tensor, Tensor)");
  library.def(
      "dispatch_bwd(int group, Tensor handle_mem, Tensor grad_recv, Tensor? grad_recv_weights, int top_k, int alignment, "
      "SymInt num_tokens, int[] format=[], float amax_floor=0) -> (Tensor, Tensor)");
}

// A tensor on another device than the group's is refused with a sentence by the kernel itself, so one kernel serves all
// devices.
STABLE_TORCH_LIBRARY_IMPL(epx, CompositeExplicitAutograd, library) {
  library.impl("prepare", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::prepare>::call));
  library.impl("dispatch", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::dispatch>::call));
  library.impl("dispatch_sidecar", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::dispatch_sidecar>::call));
  library.impl("dispatch_format", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::dispatch_format>::call));
  library.impl("prepare_dispatch_format", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::prepare_dispatch_format>::call));
  library.impl("dispatch_into", TORCH_BOX(&epx_torch::dispatch_into));
  library.impl("prepare_dispatch", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::prepare_dispatch>::call));
  library.impl("prepare_dispatch_sidecar", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::prepare_dispatch_sidecar>::call));
  library.impl("combine", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::combine>::call));
  library.impl("combine_bwd", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::combine_bwd>::call));
  library.impl("dispatch_bwd", TORCH_BOX(&epx_torch::RowMajor<&epx_torch::dispatch_bwd>::call));
}
