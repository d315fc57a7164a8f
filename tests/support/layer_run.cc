// SPDX-License-Identifier: Apache-2.0
#include "tests/support/layer_run.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "base/dtypes.h"
#include "base/operations.h"
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

// Rows that were dequantised are computed, all others copied.
NanRule rule_of(const FormatCase& format) {
  return format.way == FormatWay::on_wire ? NanRule::any_nan : NanRule::bits;
}

// The plan that prepare_dispatch makes is that of prepare but for the number of the call: bytes of the same memory before.
void check_same_plan(const std::vector<std::byte>& prepared, const std::vector<std::byte>& other) {
  constexpr size_t kFirstCount = 24, kEndOfCounts = 64, kEndOfHeader = 80; // behind plan_id; before the checksums
  const auto same = [&](size_t begin, size_t end) {
    return std::memcmp(prepared.data() + begin, other.data() + begin, end - begin) == 0; // one access to a sanitizer
  };
  check(same(kFirstCount, kEndOfCounts), "the header of prepare_dispatch's plan is not that of prepare's");
  check(same(kEndOfHeader, prepared.size()), "prepare_dispatch's plan is not that of prepare");
}

} // namespace

// The tensors of a call, with its outputs in the order in which they were made.
class LayerRun::Tensors {
public:
  explicit Tensors(CallBuffers& buffers, size_t num_earlier_outputs = 0)
      : buffers_(buffers), num_read_(num_earlier_outputs) {}

  ConstTensor rows_in(const char* name, const reference::Matrix& matrix) {
    return {buffers_.input(name, matrix.bytes, static_cast<size_t>(single_element_bytes(matrix.dtype))),
            matrix.dtype,
            {matrix.rows, matrix.cols}};
  }
  Tensor rows_out(const char* name, const reference::Matrix& shape) {
    const auto alignment = static_cast<size_t>(single_element_bytes(shape.dtype));
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

  // Call it behind all other outputs.
  RowFormat format(const FormatData& data, size_t rank) { return format_of(buffers_, data, rank); }

  // The next two have the elements of a tensor in another shape.
  static Tensor reshaped(const Tensor& tensor, Shape shape) { return {tensor.data(), tensor.dtype(), shape}; }
  static ConstTensor reshaped(const ConstTensor& tensor, Shape shape) { return {tensor.data(), tensor.dtype(), shape}; }

  // `rule` other than bits: the scales are float32, and were computed.
  void check_scales(const std::optional<FormatData>& format, size_t rank, NanRule rule = NanRule::bits) {
    if (!format || format->recv_scales.empty()) return;
    const std::vector<std::byte>& expected = format->recv_scales[rank].bytes;
    if (rule == NanRule::bits)
      check_bytes("recv_scales", expected, next_output());
    else
      check_rows("recv_scales", {EPX_FLOAT32, 1, static_cast<int64_t>(expected.size() / sizeof(float)), expected},
                 next_output(), rule);
    if (!format->recv_row_scales.empty())
      check_floats("recv_row_scales", format->recv_row_scales[rank], next_output(), NanRule::bits);
  }

  // Returns the next output, in the order in which they were made.
  std::vector<std::byte> next_output() { return buffers_.read_output(num_read_++); }

private:
  static Shape float_shape(const std::vector<float>& values, int64_t per_row) { // per_row 0: 1-dimensional
    const auto count = static_cast<int64_t>(values.size());
    return per_row == 0 ? Shape(count) : Shape(count / per_row, per_row);
  }

  CallBuffers& buffers_;
  size_t num_read_;
};

// The tensors of a call that makes a plan. The handle memory is the call's first output; these come next.
class LayerRun::PlanTensors {
public:
  template <typename Args>
  PlanTensors(CallBuffers& buffers, const Workload& work, const LayerCase& layer, size_t rank, Rng& rng, Args& args)
      : buffers_(buffers) {
    const reference::RankPlan& mine = work.plan.ranks[rank];
    const reference::Routing& routing = work.routing[rank];
    const std::vector<std::byte> indices = encode_integers(routing.topk_idx, layer.index_dtype);
    args.topk_idx = {buffers.input("topk_idx", indices, integer_bytes(layer.index_dtype)),
                     layer.index_dtype,
                     {routing.num_tokens, layer.top_k}};
    const epx_dtype counts = layer.counts_dtype;
    const auto num_experts = static_cast<int64_t>(mine.counts.size());
    const auto add = [&](const char* name, std::vector<int64_t> expected, epx_dtype dtype, Shape shape) {
      const size_t size = integer_bytes(dtype);
      const Tensor tensor(buffers.output(name, expected.size() * size, size), dtype, shape);
      outputs_.push_back({name, std::move(expected), dtype});
      return tensor;
    };
    const auto leaves_out = [&] { return rng.chance(30); }; // an optional output, on this rank
    args.counts = add("counts", mine.counts, counts, num_experts);
    args.offsets = add("offsets", mine.offsets, counts, num_experts + 1);
    if (!leaves_out())
      args.global_counts =
          add("global_counts", work.plan.global_counts, counts, {work.group.num_ranks, work.group.num_experts});
    if (!leaves_out()) args.info = add("info", {mine.info.begin(), mine.info.end()}, EPX_INT64, 5);
    if (!leaves_out()) args.slot = add("slot", widen(mine.slot), EPX_INT32, {routing.num_tokens, layer.top_k});
    if (!leaves_out())
      args.slot_origin = add("slot_origin", widen(mine.slot_origin), EPX_INT32, {recv_capacity(work.group), 3});
  }

  size_t num_outputs() const { return 1 + outputs_.size(); } // with the handle memory

  // The counts that all ranks have tell what the plans of all ranks say.
  static void check_load(const GroupView& group, const Layer& layer, int64_t zone_stride, const Workload& work) {
    const epx_load_report load =
        group.load_of_counts(layer, {work.plan.global_counts, {work.group.num_ranks, work.group.num_experts}}, zone_stride);
    int64_t routes = 0, dropped = 0, most = 0, rows = 0;
    for (const reference::RankPlan& rank : work.plan.ranks) {
      routes += rank.info[0];
      dropped += rank.info[2];
      most = std::max(most, rank.info[0]);
      rows = std::max(rows, rank.info[4]);
    }
    check(load.routes == routes && load.most_routes_of_rank == most,
          "epx_load_of_counts says {} routes, {} to a rank; {}, {}", load.routes, load.most_routes_of_rank, routes, most);
    check(load.dropped == dropped, "epx_load_of_counts says that {} routes are dropped, the plans {}", load.dropped,
          dropped);
    check(zone_stride > 0 || load.rows_needed == rows, "epx_load_of_counts says that {} rows are needed, the plans {}",
          load.rows_needed, rows);
  }

  void check_outputs() const {
    for (size_t i = 0; i < outputs_.size(); ++i)
      check_integers(outputs_[i].name, outputs_[i].expected, buffers_.read_output(1 + i), outputs_[i].dtype);
  }

private:
  struct Output {
    const char* name;
    std::vector<int64_t> expected;
    epx_dtype dtype;
  };
  CallBuffers& buffers_;
  std::vector<Output> outputs_;
};

LayerRun::LayerRun(GroupRun& group, const LayerCase& layer, Placement placement, uint64_t seed)
    : group_(group), layer_(layer), epx_layer_{.top_k = layer.top_k, .alignment = layer.alignment}, placement_(placement),
      rng_(mix(seed, 0x1a7e4 + static_cast<uint64_t>(group.rank()))) {
  const size_t bytes = group_.view().handle_mem_size(epx_layer_);
  const GroupCase& shape = group_.shape();
  const int64_t nodes = num_nodes(shape), rest = int64_t{8} * shape.num_ranks * shape.num_experts + 64 * 1024;
  const int64_t chunk = std::min<int64_t>(shape.max_tokens, 1024), padded = (shape.max_tokens + chunk - 1) / chunk * chunk;
  const bool has_legs = nodes > 1 && group.device().transport() != EPX_TRANSPORT_HOST;
  const int64_t limit = has_legs ? 12 * (nodes + 1) * padded * layer.top_k + (4 * shape.num_ranks + 16 * nodes) * padded +
                                       12 * recv_capacity(shape) + rest
                                 : 16 * (int64_t{shape.max_tokens} * layer.top_k + recv_capacity(shape)) + rest;
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
  if (mismatch_ && operation != EPX_OP_PREPARE && operation != EPX_OP_PREPARE_DISPATCH &&
      operation != EPX_OP_DISPATCH_RANK_MAJOR)
    group_.expect_event(EPX_EVENT_HANDLE_MISMATCH, operation, 1);
}

void LayerRun::expect_after_call(const Workload& work, epx_operation operation, int64_t rows) {
  const reference::RankPlan& mine = work.plan.ranks[static_cast<size_t>(group_.rank())];
  if (!useless_) group_.expect_event(EPX_EVENT_TOO_FEW_ROWS, operation, routes_beyond(mine, rows));
  if (rng_.chance(50)) group_.check_status(); // otherwise the status is read later, and the events of several calls add up
}

void LayerRun::prepare(const Workload& work) {
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  before_prepare_ = handle_;
  prepared_ = &work;
  auto args = make_plan_args<PrepareArgs>(buffers);
  PlanTensors tensors(buffers, work, layer_, static_cast<size_t>(group_.rank()), rng_, args);
  args.zone_stride = layer_.zone_stride;
  group_.view().prepare(args);
  finish(buffers, EPX_OP_PREPARE);
  mismatch_ = useless_ = false;
  handle_ = buffers.read_output(0);
  tensors.check_outputs();
  if (group_.shape().fixed_rail_tokens == 0) PlanTensors::check_load(group_.view(), epx_layer_, layer_.zone_stride, work);
  expect_after_prepare(work, EPX_OP_PREPARE);
  if (rng_.chance(50)) group_.check_status();
}

void LayerRun::dispatch(const Workload& work) {
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_args<DispatchArgs>(buffers);
  pass_rows(tensors, work, args);

  group_.view().dispatch(args);
  finish(buffers, EPX_OP_DISPATCH);
  check_received(tensors, work);
  expect_after_call(work, EPX_OP_DISPATCH, work.dispatch.recv_tokens[static_cast<size_t>(group_.rank())].rows);
}

void LayerRun::prepare_dispatch(const Workload& work) {
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  const bool is_prepared = std::exchange(prepared_, nullptr) == &work && !mismatch_;
  const std::vector<std::byte> prepared = handle_;
  if (is_prepared) handle_ = before_prepare_; // so that what neither call writes is the same
  auto args = make_plan_args<PrepareDispatchArgs>(buffers);
  PlanTensors plan(buffers, work, layer_, static_cast<size_t>(group_.rank()), rng_, args);
  Tensors tensors(buffers, plan.num_outputs());
  pass_rows(tensors, work, args);
  args.zone_stride = layer_.zone_stride;

  group_.view().prepare_dispatch(args);
  finish(buffers, EPX_OP_PREPARE_DISPATCH);
  mismatch_ = useless_ = false;
  handle_ = buffers.read_output(0);
  plan.check_outputs();
  check_received(tensors, work);
  if (is_prepared && std::getenv("EPX_TEST_ALTERNATES_PATHS") == nullptr) check_same_plan(prepared, handle_);
  expect_after_prepare(work, EPX_OP_PREPARE_DISPATCH);
  expect_after_call(work, EPX_OP_PREPARE_DISPATCH, work.dispatch.recv_tokens[static_cast<size_t>(group_.rank())].rows);
}

template <typename Args>
Args LayerRun::make_plan_args(CallBuffers& buffers) {
  auto* const handle = static_cast<std::byte*>(buffers.output("handle memory", handle_.size(), 16));
  group_.device().write(handle, handle_.data(),
                        handle_.size()); // the memory holds zeros, or what the previous prepare wrote
  return {.layer = epx_layer_, .handle_mem = {handle, handle_.size()}, .stream = group_.device().stream()};
}

template <typename Args>
void LayerRun::pass_rows(Tensors& tensors, const Workload& work, Args& args) {
  const auto rank = static_cast<size_t>(group_.rank());
  const DispatchData& data = work.dispatch;
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
  if (data.format) args.format = tensors.format(*data.format, rank);
  args.pads = layer_.pads_untouched ? EPX_PADS_UNTOUCHED : EPX_PADS_ZERO;
}

void LayerRun::check_received(Tensors& tensors, const Workload& work) const {
  const auto rank = static_cast<size_t>(group_.rank());
  const DispatchData& data = work.dispatch;
  check_rows("recv_tokens", data.recv_tokens[rank], tensors.next_output(), rule_of(layer_.format));
  if (!data.sidecars.empty()) check_bytes("recv sidecar", data.recv_sidecars[rank].bytes, tensors.next_output());
  if (!data.topk_weights.empty())
    check_floats("recv_weights", data.recv_weights[rank], tensors.next_output(), NanRule::bits);
  tensors.check_scales(data.format, rank);
}

void LayerRun::expect_after_prepare(const Workload& work, epx_operation operation) {
  const reference::RankPlan& mine = work.plan.ranks[static_cast<size_t>(group_.rank())];
  group_.expect_event(EPX_EVENT_BAD_INDEX, operation, mine.bad_indices);
  if (work.group.overflow == EPX_OVERFLOW_ERROR) group_.expect_event(EPX_EVENT_OVERFLOW, operation, mine.info[2]);
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

  args.format = wire_format(layer_.sum_format);
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
  if (data.format) args.format = tensors.format(*data.format, rank);

  group_.view().combine_bwd(args);
  finish(buffers, EPX_OP_COMBINE_BWD);
  const NanRule rule = data.recv_weights.empty() ? rule_of(layer_.combine_bwd_format) : NanRule::any_nan;
  check_rows("grad_expert_out", data.grad_expert_out[rank], tensors.next_output(), rule);
  if (!data.grad_recv_weights.empty()) {
    check_floats("grad_recv_weights", data.grad_recv_weights[rank], tensors.next_output(), NanRule::any_nan);
  }
  tensors.check_scales(data.format, rank, data.recv_weights.empty() ? NanRule::bits : NanRule::any_nan);
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

  args.format = wire_format(layer_.sum_format);
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
  const Shape row_routes = by_source(work, layer_.top_k);
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
  args.recv_tokens =
      Tensors::reshaped(tensors.rows_out("recv_tokens", data.recv_tokens[rank]), by_source(work, layer_.hidden));
  if (!data.sidecars.empty()) {
    args.tokens = tensors.sidecar_in(args.tokens, data.sidecars[rank]);
    args.recv_tokens = tensors.sidecar_out(args.recv_tokens, data.recv_sidecars[rank]);
  }
  args.recv_topk_idx = {buffers.output("recv_topk_idx", data.recv_topk_idx[rank].size() * index_bytes, index_bytes),
                        layer_.counts_dtype, row_routes};
  if (!data.topk_weights.empty()) {
    args.topk_weights = tensors.floats_in("topk_weights", data.topk_weights[rank], layer_.top_k);
    args.recv_weights = Tensors::reshaped(tensors.floats_out("recv_weights", data.recv_weights[rank], 0), row_routes);
  }
  args.counts = {buffers.output("counts", data.counts[rank].size() * index_bytes, index_bytes), layer_.counts_dtype,
                 group_.shape().num_ranks};
  if (data.format) args.format = tensors.format(*data.format, rank);

  args.row_spacing = layer_.rank_major_compact ? EPX_ROWS_COMPACT : EPX_ROWS_STRIDED;
  group_.view().dispatch_rank_major(args);
  finish(buffers, EPX_OP_DISPATCH_RANK_MAJOR);
  mismatch_ = useless_ = false;
  rank_major_handle_ = tensors.next_output();
  check_rows("recv_tokens", data.recv_tokens[rank], tensors.next_output(), rule_of(layer_.rank_major_format));
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
  tensors.check_scales(data.format, rank);
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
  args.expert_out =
      Tensors::reshaped(tensors.rows_in("expert_out", data.expert_out[rank]), by_source(work, layer_.combine_hidden));
  args.out = tensors.rows_out("out", data.out[rank]);

  args.format = wire_format(layer_.sum_format);
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
  args.grad_expert_out = Tensors::reshaped(tensors.rows_out("grad_expert_out", data.grad_expert_out[rank]),
                                           by_source(work, layer_.combine_hidden));
  if (data.format) args.format = tensors.format(*data.format, rank);

  group_.view().combine_rank_major_bwd(args);
  finish(buffers, EPX_OP_COMBINE_RANK_MAJOR_BWD);
  check_rows("grad_expert_out", data.grad_expert_out[rank], tensors.next_output(),
             rule_of(layer_.combine_rank_major_bwd_format));
  tensors.check_scales(data.format, rank);
}

void LayerRun::dispatch_rank_major_bwd(const Workload& work) {
  const auto rank = static_cast<size_t>(group_.rank());
  const RankMajorData::DispatchBwd& data = work.rank_major->dispatch_bwd;
  CallBuffers buffers(group_.device(), group_.arenas(), placement_, rng_);
  Tensors tensors(buffers);
  auto args = make_rank_major_args<DispatchRankMajorBwdArgs>(buffers);
  args.grad_recv = Tensors::reshaped(tensors.rows_in("grad_recv", data.grad_recv[rank]), by_source(work, layer_.hidden));
  args.grad_tokens = tensors.rows_out("grad_tokens", data.grad_tokens[rank]);
  if (!data.grad_recv_weights.empty()) {
    args.grad_recv_weights = Tensors::reshaped(tensors.floats_in("grad_recv_weights", data.grad_recv_weights[rank], 0),
                                               by_source(work, layer_.top_k));
    args.grad_topk_weights = tensors.floats_out("grad_topk_weights", data.grad_topk_weights[rank], layer_.top_k);
  }

  args.format = wire_format(layer_.sum_format);
  group_.view().dispatch_rank_major_bwd(args);
  finish(buffers, EPX_OP_DISPATCH_RANK_MAJOR_BWD);
  check_rows("grad_tokens", data.grad_tokens[rank], tensors.next_output(), NanRule::any_nan);
  if (!data.grad_recv_weights.empty())
    check_floats("grad_topk_weights", data.grad_topk_weights[rank], tensors.next_output(), NanRule::bits);
}

void LayerRun::call(epx_operation operation, const Workload& work) {
  switch (operation) {
#define EPX_TEST_CALL(NUMBER, name, ...)                                                                                   \
  case EPX_OP_##NUMBER:                                                                                                    \
    return name(work);
    EPX_LAYER_OPERATIONS(EPX_TEST_CALL)
#undef EPX_TEST_CALL
  default:
    fail_check("a layer makes no call of operation {}", static_cast<int>(operation));
  }
}

void LayerRun::movements(const Workload& work) {
  for (const epx_operation operation : {EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD})
    call(operation, work);
}

void run_iteration(GroupRun& group, LayerRun& layer, const Workload& work) {
  layer.prepare(work);
  layer.dispatch(work);
  layer.prepare_dispatch(work);
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
