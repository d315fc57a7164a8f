// SPDX-License-Identifier: Apache-2.0
#include "tests/support/layer_run.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tests/support/check.h"
#include "tests/support/compare.h"
#include "tests/support/values.h"

namespace epx::test {

namespace {

size_t integer_bytes(epx_dtype dtype) {
  return dtype == EPX_INT32 ? 4 : 8;
}

std::span<const std::byte> bytes_of(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}

std::vector<std::byte> encode_integers(const std::vector<int64_t>& values, epx_dtype dtype) {
  const size_t size = integer_bytes(dtype);
  std::vector<std::byte> bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto narrow = static_cast<int32_t>(values[i]);
    std::memcpy(bytes.data() + i * size, size == 4 ? static_cast<const void*>(&narrow) : &values[i], size);
  }
  return bytes;
}

std::vector<int64_t> widen(const std::vector<int32_t>& values) {
  return {values.begin(), values.end()};
}

// The tensors of a call, with its outputs in the order in which they were made.
class Tensors {
public:
  explicit Tensors(CallBuffers& buffers) : buffers_(buffers) {}

  ConstTensor rows_in(const char* name, const reference::Matrix& matrix) {
    return {buffers_.input(name, matrix.bytes, static_cast<size_t>(reference::element_size(matrix.dtype))),
            matrix.dtype,
            {matrix.rows, matrix.cols}};
  }
  Tensor rows_out(const char* name, const reference::Matrix& shape) {
    const auto alignment = static_cast<size_t>(reference::element_size(shape.dtype));
    return {buffers_.output(name, shape.bytes.size(), alignment), shape.dtype, {shape.rows, shape.cols}};
  }
  ConstTensor floats_in(const char* name, const std::vector<float>& values, int64_t per_row) {
    return {buffers_.input(name, bytes_of(values), sizeof(float)), EPX_FLOAT32, float_shape(values, per_row)};
  }
  Tensor floats_out(const char* name, const std::vector<float>& shape, int64_t per_row) {
    return {buffers_.output(name, shape.size() * sizeof(float), sizeof(float)), EPX_FLOAT32, float_shape(shape, per_row)};
  }
  ConstTensor sidecar_in(const ConstTensor& tensor, const reference::Sidecar& sidecar) {
    return tensor.with_sidecar(buffers_.input("sidecar", sidecar.bytes, 1), sidecar.row_bytes);
  }
  Tensor sidecar_out(const Tensor& tensor, const reference::Sidecar& shape) {
    return tensor.with_sidecar(buffers_.output("received sidecar", shape.bytes.size(), 1), shape.row_bytes);
  }

  // Returns the next output, in the order in which they were made.
  std::vector<std::byte> next_output() { return buffers_.read_output(num_read_++); }

private:
  static Shape float_shape(const std::vector<float>& values, int64_t per_row) { // per_row 0: 1-dimensional
    const auto count = static_cast<int64_t>(values.size());
    return per_row == 0 ? Shape(count) : Shape(count / per_row, per_row);
  }

  CallBuffers& buffers_;
  size_t num_read_ = 0;
};

} // namespace

LayerRun::LayerRun(GroupRun& group, const LayerCase& layer, Placement placement, uint64_t seed)
    : group_(group), layer_(layer), epx_layer_{.top_k = layer.top_k, .alignment = layer.alignment}, placement_(placement),
      rng_(mix(seed, 0x1a7e4 + static_cast<uint64_t>(group.rank()))) {
  const size_t bytes = group_.view().handle_mem_size(epx_layer_);
  const GroupCase& shape = group_.shape();
  const int64_t limit = 16 * (static_cast<int64_t>(shape.max_tokens) * layer.top_k + recv_capacity(shape)) +
                        8 * static_cast<int64_t>(shape.num_ranks) * shape.num_experts + 64 * 1024;
  check(bytes > 0 && static_cast<int64_t>(bytes) <= limit, "handle memory takes {} bytes; at most {} are allowed", bytes,
        limit);
  handle_.resize(bytes);
  rank_major_handle_.resize(bytes);
}

void LayerRun::expect_mismatch(bool useless) {
  mismatch_ = true;
  useless_ = useless;
}

void LayerRun::use_foreign_handle(std::vector<std::byte> bytes) {
  check(bytes.size() >= handle_.size(), "a test passes handle memory of {} bytes instead of {}", bytes.size(),
        handle_.size());
  handle_ = std::move(bytes);
}

void LayerRun::use_foreign_rank_major_handle(std::vector<std::byte> bytes) {
  check(bytes.size() >= rank_major_handle_.size(), "a test passes handle memory of {} bytes instead of {}", bytes.size(),
        rank_major_handle_.size());
  rank_major_handle_ = std::move(bytes);
}

template <typename Args>
Args LayerRun::make_rank_major_args(CallBuffers& buffers) {
  auto* const handle = static_cast<const std::byte*>(buffers.input("handle memory", rank_major_handle_, 16));
  return {.layer = {.top_k = layer_.top_k, .alignment = rng_.chance(50) ? 0 : 1},
          .handle_mem = {handle, rank_major_handle_.size()},
          .stream = group_.device().stream()};
}

template <typename Args>
Args LayerRun::make_args(CallBuffers& buffers) {
  // The handle memory is always a copy of the bytes that prepare wrote, at a new address; prepare's own memory has been freed.
  auto* const handle = static_cast<const std::byte*>(buffers.input("handle memory", handle_, 16));
  return {.layer = epx_layer_, .handle_mem = {handle, handle_.size()}, .stream = group_.device().stream()};
}

void LayerRun::finish(CallBuffers& buffers, epx_operation operation) {
  group_.count_call();
  buffers.check_surroundings();
  if (mismatch_ && operation != EPX_OP_PREPARE && operation != EPX_OP_DISPATCH_RANK_MAJOR)
    group_.expect_event(EPX_EVENT_HANDLE_MISMATCH, operation, 1);
}

void LayerRun::expect_after_call(const Workload& work, epx_operation operation, int64_t rows) {
  const reference::RankPlan& mine = work.plan.ranks[static_cast<size_t>(group_.rank())];
  if (!useless_) group_.expect_event(EPX_EVENT_TOO_FEW_ROWS, operation, routes_beyond(mine, rows));
  if (rng_.chance(50)) group_.check_status(); // otherwise the status is read later, and the events of several calls add up
}

void LayerRun::prepare(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const reference::RankPlan& mine = work.plan.ranks[rank];
  const reference::Routing& routing = work.routing[rank];
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);

  // Each entry has name, expected values, dtype and shape of an output; the first two are required, the others are optional.
  struct Output {
    const char* name;
    std::vector<int64_t> expected;
    epx_dtype dtype;
    Shape shape;
    Tensor PrepareArgs::*field;
  };
  const epx_dtype counts = layer_.counts_dtype;
  const auto num_experts = static_cast<int64_t>(mine.counts.size());
  const std::array<Output, 6> outputs = {{
      {"counts", mine.counts, counts, num_experts, &PrepareArgs::counts},
      {"offsets", mine.offsets, counts, num_experts + 1, &PrepareArgs::offsets},
      {"global_counts",
       work.plan.global_counts,
       counts,
       {work.group.num_ranks, work.group.num_experts},
       &PrepareArgs::global_counts},
      {"info", {mine.info.begin(), mine.info.end()}, EPX_INT64, 5, &PrepareArgs::info},
      {"slot", widen(mine.slot), EPX_INT32, {routing.num_tokens, layer_.top_k}, &PrepareArgs::slot},
      {"slot_origin", widen(mine.slot_origin), EPX_INT32, {recv_capacity(work.group), 3}, &PrepareArgs::slot_origin},
  }};

  const std::vector<std::byte> indices = encode_integers(routing.topk_idx, layer_.index_dtype);
  const ConstTensor topk_idx(buffers.input("topk_idx", indices, integer_bytes(layer_.index_dtype)), layer_.index_dtype,
                             {routing.num_tokens, layer_.top_k});
  auto* const handle = static_cast<std::byte*>(buffers.output("handle memory", handle_.size(), 16));
  group_.device().write(handle, handle_.data(),
                        handle_.size()); // the memory holds zeros, or what the previous prepare wrote
  PrepareArgs args = {.layer = epx_layer_,
                      .handle_mem = {handle, handle_.size()},
                      .stream = group_.device().stream(),
                      .topk_idx = topk_idx};
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (i >= 2 && rng_.chance(30)) continue; // this rank leaves the optional output out
    const Output& output = outputs[i];
    const size_t size = integer_bytes(output.dtype);
    args.*output.field = {buffers.output(output.name, output.expected.size() * size, size), output.dtype, output.shape};
  }

  group_.view().prepare(args);
  finish(buffers, EPX_OP_PREPARE);
  size_t next = 0;
  handle_ = buffers.read_output(next++);
  mismatch_ = useless_ = false;
  for (const Output& output : outputs) {
    if (!(args.*output.field)) continue;
    check_integers(output.name, output.expected, buffers.read_output(next++), output.dtype);
  }
  group_.expect_event(EPX_EVENT_BAD_INDEX, EPX_OP_PREPARE, mine.bad_indices);
  if (work.group.overflow == EPX_OVERFLOW_ERROR) {
    group_.expect_event(EPX_EVENT_OVERFLOW, EPX_OP_PREPARE, mine.info[2]);
  }
  if (rng_.chance(50)) group_.check_status();
}

void LayerRun::dispatch(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const DispatchData& data = work.dispatch;
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_args<DispatchArgs>(buffers);

  args.tokens = tensors.rows_in("tokens", data.tokens[rank]);
  args.recv_tokens = tensors.rows_out("recv_tokens", data.recv_tokens[rank]);
  if (!data.sidecars.empty()) {
    args.tokens = tensors.sidecar_in(args.tokens, data.sidecars[rank]);
    args.recv_tokens = tensors.sidecar_out(args.recv_tokens, data.recv_sidecars[rank]);
  }
  if (!data.topk_weights.empty()) {
    args.topk_weights = tensors.floats_in("topk_weights", data.topk_weights[rank], layer_.top_k);
    args.recv_weights = tensors.floats_out("recv_weights", data.recv_weights[rank], 0);
  }
  args.pads = layer_.pads_untouched ? EPX_PADS_UNTOUCHED : EPX_PADS_ZERO;

  group_.view().dispatch(args);
  finish(buffers, EPX_OP_DISPATCH);
  check_rows("recv_tokens", data.recv_tokens[rank], tensors.next_output(), NanRule::bits);
  if (!data.sidecars.empty()) check_bytes("recv sidecar", data.recv_sidecars[rank].bytes, tensors.next_output());
  if (!data.topk_weights.empty()) {
    check_floats("recv_weights", data.recv_weights[rank], tensors.next_output(), NanRule::bits);
  }
  expect_after_call(work, EPX_OP_DISPATCH, data.recv_tokens[rank].rows);
}

void LayerRun::combine(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const CombineData& data = work.combine;
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_args<CombineArgs>(buffers);

  args.expert_out = tensors.rows_in("expert_out", data.expert_out[rank]);
  args.out = tensors.rows_out("out", data.out[rank]);
  if (!data.recv_weights.empty()) {
    args.recv_weights = tensors.floats_in("recv_weights", data.recv_weights[rank], 0);
  }

  group_.view().combine(args);
  finish(buffers, EPX_OP_COMBINE);
  check_rows("out", data.out[rank], tensors.next_output(), NanRule::any_nan);
  expect_after_call(work, EPX_OP_COMBINE, data.expert_out[rank].rows);
}

void LayerRun::combine_bwd(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const CombineBwdData& data = work.combine_bwd;
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_args<CombineBwdArgs>(buffers);

  args.grad_out = tensors.rows_in("grad_out", data.grad_out[rank]);
  args.grad_expert_out = tensors.rows_out("grad_expert_out", data.grad_expert_out[rank]);
  if (!data.recv_weights.empty()) {
    args.recv_weights = tensors.floats_in("recv_weights", data.recv_weights[rank], 0);
  }
  if (!data.grad_recv_weights.empty()) {
    args.expert_out = tensors.rows_in("expert_out", data.expert_out[rank]);
    args.grad_recv_weights = tensors.floats_out("grad_recv_weights", data.grad_recv_weights[rank], 0);
  }

  group_.view().combine_bwd(args);
  finish(buffers, EPX_OP_COMBINE_BWD);
  const NanRule rule = data.recv_weights.empty() ? NanRule::bits : NanRule::any_nan;
  check_rows("grad_expert_out", data.grad_expert_out[rank], tensors.next_output(), rule);
  if (!data.grad_recv_weights.empty()) {
    check_floats("grad_recv_weights", data.grad_recv_weights[rank], tensors.next_output(), NanRule::any_nan);
  }
  expect_after_call(work, EPX_OP_COMBINE_BWD, data.grad_expert_out[rank].rows);
}

void LayerRun::dispatch_bwd(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const DispatchBwdData& data = work.dispatch_bwd;
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_args<DispatchBwdArgs>(buffers);

  args.grad_recv = tensors.rows_in("grad_recv", data.grad_recv[rank]);
  args.grad_tokens = tensors.rows_out("grad_tokens", data.grad_tokens[rank]);
  if (!data.grad_recv_weights.empty()) {
    args.grad_recv_weights = tensors.floats_in("grad_recv_weights", data.grad_recv_weights[rank], 0);
    args.grad_topk_weights = tensors.floats_out("grad_topk_weights", data.grad_topk_weights[rank], layer_.top_k);
  }

  group_.view().dispatch_bwd(args);
  finish(buffers, EPX_OP_DISPATCH_BWD);
  check_rows("grad_tokens", data.grad_tokens[rank], tensors.next_output(), NanRule::any_nan);
  if (!data.grad_recv_weights.empty()) {
    check_floats("grad_topk_weights", data.grad_topk_weights[rank], tensors.next_output(), NanRule::bits);
  }
  expect_after_call(work, EPX_OP_DISPATCH_BWD, data.grad_recv[rank].rows);
}

void LayerRun::dispatch_rank_major(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const RankMajorData::Dispatch& data = work.rank_major->dispatch;
  const Shape row_routes(group_.shape().num_ranks, work.rank_major->rows_per_source, layer_.top_k);
  const auto rank_major = [&](const Tensor& rows) {
    return Tensor(rows.data(), rows.dtype(), {group_.shape().num_ranks, work.rank_major->rows_per_source, layer_.hidden});
  };
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);

  auto* const handle = static_cast<std::byte*>(buffers.output("handle memory", rank_major_handle_.size(), 16));
  group_.device().write(handle, rank_major_handle_.data(), rank_major_handle_.size());
  const std::vector<std::byte> indices = encode_integers(work.routing[rank].topk_idx, layer_.index_dtype);
  const size_t index_bytes = integer_bytes(layer_.counts_dtype);
  DispatchRankMajorArgs args = {.layer = {.top_k = layer_.top_k},
                                .handle_mem = {handle, rank_major_handle_.size()},
                                .stream = group_.device().stream()};
  args.tokens = tensors.rows_in("tokens", data.tokens[rank]);
  args.topk_idx = {buffers.input("topk_idx", indices, integer_bytes(layer_.index_dtype)),
                   layer_.index_dtype,
                   {data.tokens[rank].rows, layer_.top_k}};
  args.recv_tokens = rank_major(tensors.rows_out("recv_tokens", data.recv_tokens[rank]));
  if (!data.sidecars.empty()) {
    args.tokens = tensors.sidecar_in(args.tokens, data.sidecars[rank]);
    args.recv_tokens = tensors.sidecar_out(args.recv_tokens, data.recv_sidecars[rank]);
  }
  args.recv_topk_idx = {buffers.output("recv_topk_idx", data.recv_topk_idx[rank].size() * index_bytes, index_bytes),
                        layer_.counts_dtype, row_routes};
  if (!data.topk_weights.empty()) {
    args.topk_weights = tensors.floats_in("topk_weights", data.topk_weights[rank], layer_.top_k);
    args.recv_weights = {buffers.output("recv_weights", data.recv_weights[rank].size() * sizeof(float), sizeof(float)),
                         EPX_FLOAT32, row_routes};
  }
  args.counts = {buffers.output("counts", data.counts[rank].size() * index_bytes, index_bytes), layer_.counts_dtype,
                 group_.shape().num_ranks};

  group_.view().dispatch_rank_major(args);
  finish(buffers, EPX_OP_DISPATCH_RANK_MAJOR);
  mismatch_ = useless_ = false;
  rank_major_handle_ = tensors.next_output();
  check_rows("recv_tokens", data.recv_tokens[rank], tensors.next_output(), NanRule::bits);
  if (!data.sidecars.empty()) check_bytes("recv sidecar", data.recv_sidecars[rank].bytes, tensors.next_output());
  // As an int64, what the call must not write holds other bits than as an int32.
  const auto expected = [&](std::vector<int64_t> values) {
    if (layer_.counts_dtype == EPX_INT64)
      std::ranges::replace(values, kScribbledInteger, static_cast<int64_t>(0xa5a5a5a5a5a5a5a5));
    return values;
  };
  check_integers("recv_topk_idx", expected(data.recv_topk_idx[rank]), tensors.next_output(), layer_.counts_dtype);
  if (!data.topk_weights.empty())
    check_floats("recv_weights", data.recv_weights[rank], tensors.next_output(), NanRule::bits);
  check_integers("counts", expected(data.counts[rank]), tensors.next_output(), layer_.counts_dtype);
  const reference::RankMajorRank& mine = work.rank_major->plan.ranks[rank];
  group_.expect_event(EPX_EVENT_BAD_INDEX, EPX_OP_DISPATCH_RANK_MAJOR, mine.bad_indices);
  group_.expect_event(EPX_EVENT_TOO_FEW_ROWS, EPX_OP_DISPATCH_RANK_MAJOR, mine.dropped_here);
  if (rng_.chance(50)) group_.check_status();
}

void LayerRun::combine_rank_major(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const RankMajorData::Combine& data = work.rank_major->combine;
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_rank_major_args<CombineRankMajorArgs>(buffers);
  const ConstTensor rows = tensors.rows_in("expert_out", data.expert_out[rank]);
  args.expert_out = {
      rows.data(), rows.dtype(), {group_.shape().num_ranks, work.rank_major->rows_per_source, layer_.combine_hidden}};
  args.out = tensors.rows_out("out", data.out[rank]);

  group_.view().combine_rank_major(args);
  finish(buffers, EPX_OP_COMBINE_RANK_MAJOR);
  check_rows("out", data.out[rank], tensors.next_output(), NanRule::any_nan);
}

void LayerRun::combine_rank_major_bwd(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const RankMajorData::CombineBwd& data = work.rank_major->combine_bwd;
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_rank_major_args<CombineRankMajorBwdArgs>(buffers);
  args.grad_out = tensors.rows_in("grad_out", data.grad_out[rank]);
  const Tensor rows = tensors.rows_out("grad_expert_out", data.grad_expert_out[rank]);
  args.grad_expert_out = {
      rows.data(), rows.dtype(), {group_.shape().num_ranks, work.rank_major->rows_per_source, layer_.combine_hidden}};

  group_.view().combine_rank_major_bwd(args);
  finish(buffers, EPX_OP_COMBINE_RANK_MAJOR_BWD);
  check_rows("grad_expert_out", data.grad_expert_out[rank], tensors.next_output(), NanRule::bits);
}

void LayerRun::dispatch_rank_major_bwd(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const RankMajorData::DispatchBwd& data = work.rank_major->dispatch_bwd;
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_rank_major_args<DispatchRankMajorBwdArgs>(buffers);
  const ConstTensor rows = tensors.rows_in("grad_recv", data.grad_recv[rank]);
  args.grad_recv = {rows.data(), rows.dtype(), {group_.shape().num_ranks, work.rank_major->rows_per_source, layer_.hidden}};
  args.grad_tokens = tensors.rows_out("grad_tokens", data.grad_tokens[rank]);
  if (!data.grad_recv_weights.empty()) {
    const ConstTensor weights = tensors.floats_in("grad_recv_weights", data.grad_recv_weights[rank], 0);
    args.grad_recv_weights = {
        weights.data(), EPX_FLOAT32, {group_.shape().num_ranks, work.rank_major->rows_per_source, layer_.top_k}};
    args.grad_topk_weights = tensors.floats_out("grad_topk_weights", data.grad_topk_weights[rank], layer_.top_k);
  }

  group_.view().dispatch_rank_major_bwd(args);
  finish(buffers, EPX_OP_DISPATCH_RANK_MAJOR_BWD);
  check_rows("grad_tokens", data.grad_tokens[rank], tensors.next_output(), NanRule::any_nan);
  if (!data.grad_recv_weights.empty())
    check_floats("grad_topk_weights", data.grad_topk_weights[rank], tensors.next_output(), NanRule::bits);
}

void run_iteration(GroupRun& group, LayerRun& layer, const Workload& work) {
  layer.prepare(work);
  layer.dispatch(work);
  layer.combine(work);
  layer.combine_bwd(work);
  layer.dispatch_bwd(work);
  if (work.rank_major) {
    const bool sums = group.shape().precision != EPX_COMBINE_EXACT;
    layer.dispatch_rank_major(work);
    if (sums) layer.combine_rank_major(work);
    layer.combine_rank_major_bwd(work);
    if (sums) layer.dispatch_rank_major_bwd(work);
  }
  group.check_status();
}

void run_case(const RankContext& context, Workloads& workloads) {
  const Case& test_case = workloads.test_case();
  GroupRun group(context, test_case.group);
  for (int i = 0; i < test_case.num_arenas; ++i)
    group.add_arena(test_case.arena_bytes);
  LayerRun layer(group, test_case.layer, test_case.placement, test_case.seed);
  for (int iteration = 0; iteration < test_case.iterations; ++iteration) {
    run_iteration(group, layer, workloads[iteration]);
    if (iteration == 0 && group.arenas().size() > 1) group.free_arena(0);
  }
}

} // namespace epx::test
