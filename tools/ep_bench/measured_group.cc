// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/measured_group.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/interrupt.h"

namespace epx::bench {
namespace {

Tensor vector_of(const Buffer& buffer, epx_dtype dtype, size_t element_bytes) {
  return {buffer.data(), dtype, buffer.size() / element_bytes};
}
Tensor integers(const Buffer& buffer) {
  return vector_of(buffer, EPX_INT64, sizeof(int64_t));
}
Tensor floats(const Buffer& buffer) {
  return vector_of(buffer, EPX_FLOAT32, sizeof(float));
}

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

} // namespace

GroupConfig group_config(const Options& options) {
  GroupConfig config;
  config.num_experts = options.experts;
  config.max_tokens_per_rank = std::max(options.tokens, 1);
  config.hidden_dim = options.hidden;
  config.max_top_k = options.top_k;
  config.max_alignment = std::max(options.alignment, 1);
  config.max_token_dtype = options.dtype;
  config.max_recv_tokens_per_rank = options.capacity;
  config.combine_precision = options.combine_precision;
  config.transport = options.transport;
  config.num_comm_sms = options.num_comm_sms;
  config.ranks_per_node = options.ranks_per_node;
  config.fixed_rail_tokens = options.fixed_rail_tokens;
  if (options.timeout_ms > 0) config.timeout_ms = options.timeout_ms;
  return config;
}

MeasuredGroup::MeasuredGroup(const epx_bootstrap& bootstrap, const Options& options, Memory& memory)
    : options_(options), memory_(memory), layer_{.top_k = options.top_k, .alignment = options.alignment} {
  using std::chrono::steady_clock;
  const GroupConfig config = group_config(options);
  const KeepWaiting keep_waiting; // else a signal would end the bootstrap, by which the ranks tell each other of it
  const steady_clock::time_point begin = steady_clock::now();
  group_ = Group(bootstrap, config);
  creation_ms_ = std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();

  info_ = group_.query();
  handle_mem_ = Buffer::plain(memory, group_.handle_mem_size(layer_));

  const int64_t tokens = options.tokens, routes = tokens * options.top_k;
  const auto plain = [&](int64_t count, size_t element_bytes) { return Buffer::plain(memory, count * element_bytes); };
  prepared_.counts = plain(info_.num_local_experts, sizeof(int64_t));
  prepared_.offsets = plain(info_.num_local_experts + 1, sizeof(int64_t));
  prepared_.global_counts = plain(int64_t{info_.num_ranks} * options.experts, sizeof(int64_t));
  prepared_.info = plain(std::tuple_size_v<decltype(PrepareOutputs::info)>, sizeof(int64_t));
  prepared_.slot = plain(routes, sizeof(int32_t));
  prepared_.slot_origin = plain(info_.max_recv_tokens_per_rank * 3, sizeof(int32_t));
  by_token_.out = plain(tokens, row_bytes(options));
  by_token_.grad_tokens = plain(tokens, row_bytes(options));
  by_token_.grad_topk_weights = plain(routes, sizeof(float));
}

void MeasuredGroup::allocate_rows(int64_t rows) {
  const auto allocate = [this](size_t bytes) {
    return options_.staged ? Buffer::plain(memory_, bytes) : Buffer::window(memory_, group_, bytes);
  };
  rows_ = rows;
  const int64_t weights = rows * (options_.is_rank_major() ? options_.top_k : 1);
  by_row_.recv_tokens = allocate(rows * epx::row_bytes(recv_tokens_dtype(options_), options_.hidden));
  if (options_.row_format != NamedFormat::None) by_row_.recv_scales = allocate(recv_scales_bytes(options_, rows));
  if (options_.row_format != NamedFormat::None && quantised_row(options_).has_row_scale())
    by_row_.recv_row_scales = allocate(rows * sizeof(float));
  by_row_.recv_weights = allocate(weights * sizeof(float));
  by_row_.grad_expert_out = allocate(rows * row_bytes(options_));
  if (options_.is_rank_major()) {
    by_row_.recv_topk_idx = allocate(weights * sizeof(int64_t));
    by_row_.source_counts = allocate(info_.num_ranks * sizeof(int64_t));
  } else {
    by_row_.grad_recv_weights = allocate(weights * sizeof(float));
  }
  expert_rows_.expert_out = allocate(rows * row_bytes(options_));
  expert_rows_.grad_recv = allocate(rows * row_bytes(options_));
  expert_rows_.grad_recv_weights = allocate(weights * sizeof(float));
}

TokenTensors MeasuredGroup::tensors_of(const TokenInputs& inputs) const {
  return {.topk_idx = Buffer::input(memory_, bytes_of(inputs.topk_idx)),
          .topk_weights = Buffer::input(memory_, bytes_of(inputs.topk_weights)),
          .tokens = Buffer::input(memory_, bytes_of(inputs.tokens)),
          .grad_out = Buffer::input(memory_, bytes_of(inputs.grad_out)),
          .scales = Buffer::input(memory_, bytes_of(inputs.scales)),
          .row_scales = Buffer::input(memory_, bytes_of(inputs.row_scales))};
}

void MeasuredGroup::load(const RowInputs& inputs) {
  expert_rows_.expert_out.write(inputs.expert_out);
  expert_rows_.grad_recv.write(inputs.grad_recv);
  expert_rows_.grad_recv_weights.write(inputs.grad_recv_weights);
}

void MeasuredGroup::load_recv_weights(const std::vector<float>& recv_weights) {
  by_row_.recv_weights.write(recv_weights);
}

Tensor MeasuredGroup::rows_tensor(const Buffer& buffer, epx_dtype dtype, int64_t rows) const {
  return {buffer.data(), dtype, {rows, options_.hidden}};
}

RowFormat MeasuredGroup::format_of(const TokenTensors& inputs) const {
  RowFormat format = row_format(options_);
  if (options_.row_format == NamedFormat::None) return format;
  const QuantisedRow row = quantised_row(options_);
  if (options_.has_quantised_input)
    format.scales = {inputs.scales.data(), row.scales, {options_.tokens, format.num_scales(options_.hidden)}};
  format.recv_scales = {by_row_.recv_scales.data(), options_.scale_layout == EPX_SCALES_PACKED ? EPX_INT32 : row.scales,
                        format.recv_scales_shape(rows_, options_.hidden)};
  if (!row.has_row_scale()) return format;
  if (options_.has_quantised_input) format.row_scales = {inputs.row_scales.data(), EPX_FLOAT32, options_.tokens};
  format.recv_row_scales = floats(by_row_.recv_row_scales);
  return format;
}

Tensor MeasuredGroup::by_source(const Buffer& buffer, epx_dtype dtype, int64_t columns) const {
  return {buffer.data(), dtype, {info_.num_ranks, options_.rows_per_source(), columns}};
}

template <typename Args>
void MeasuredGroup::pass_plan_tensors(const TokenTensors& inputs, bool every_output, Args& args) {
  const Shape routes(options_.tokens, options_.top_k);
  args.layer = layer_;
  args.handle_mem = handle_mem_.bytes();
  args.stream = memory_.stream();
  args.topk_idx = {inputs.topk_idx.data(), EPX_INT64, routes};
  args.counts = integers(prepared_.counts);
  args.offsets = integers(prepared_.offsets);
  args.zone_stride = options_.zone_stride;
  if (!every_output) return;
  args.global_counts = {prepared_.global_counts.data(), EPX_INT64, {info_.num_ranks, options_.experts}};
  args.info = integers(prepared_.info);
  args.slot = {prepared_.slot.data(), EPX_INT32, routes};
  args.slot_origin = {prepared_.slot_origin.data(), EPX_INT32, {info_.max_recv_tokens_per_rank, 3}};
}

void MeasuredGroup::run_prepare(const TokenTensors& inputs, bool every_output) {
  PrepareArgs args;
  pass_plan_tensors(inputs, every_output, args);
  group_.prepare(args);
}

void MeasuredGroup::run_prepare_dispatch(const TokenTensors& inputs, bool every_output) {
  PrepareDispatchArgs args;
  pass_plan_tensors(inputs, every_output, args);
  args.tokens = rows_tensor(inputs.tokens, tokens_dtype(options_), options_.tokens);
  args.topk_weights = {inputs.topk_weights.data(), EPX_FLOAT32, {options_.tokens, options_.top_k}};
  args.recv_tokens = rows_tensor(by_row_.recv_tokens, recv_tokens_dtype(options_), rows_);
  args.recv_weights = floats(by_row_.recv_weights);
  args.pads = options_.pads;
  args.format = format_of(inputs);
  group_.prepare_dispatch(args);
}

void MeasuredGroup::prepare(const TokenTensors& inputs) {
  run_prepare(inputs, false);
}
void MeasuredGroup::prepare_fully(const TokenTensors& inputs) {
  run_prepare(inputs, true);
}

void MeasuredGroup::prepare_dispatch_fully(const TokenTensors& inputs) {
  run_prepare_dispatch(inputs, true);
}

void MeasuredGroup::dispatch(const TokenTensors& inputs) {
  if (options_.is_rank_major()) return dispatch_rank_major(inputs);
  group_.dispatch({.layer = layer_,
                   .handle_mem = handle_mem_.bytes(),
                   .stream = memory_.stream(),
                   .tokens = rows_tensor(inputs.tokens, tokens_dtype(options_), options_.tokens),
                   .topk_weights = {inputs.topk_weights.data(), EPX_FLOAT32, {options_.tokens, options_.top_k}},
                   .recv_tokens = rows_tensor(by_row_.recv_tokens, recv_tokens_dtype(options_), rows_),
                   .recv_weights = floats(by_row_.recv_weights),
                   .pads = options_.pads,
                   .format = format_of(inputs)});
}

void MeasuredGroup::combine() {
  if (options_.is_rank_major()) return combine_rank_major();
  group_.combine({.layer = layer_,
                  .handle_mem = handle_mem_.bytes(),
                  .stream = memory_.stream(),
                  .expert_out = rows_tensor(expert_rows_.expert_out, rows_),
                  .recv_weights = floats(by_row_.recv_weights),
                  .out = rows_tensor(by_token_.out, options_.tokens),
                  .format = epx::row_format(options_.sum_format)});
}

void MeasuredGroup::run_combine_bwd(const TokenTensors& inputs, bool with_weight_gradients) {
  if (options_.is_rank_major()) return combine_rank_major_bwd(inputs);
  CombineBwdArgs args = {.layer = layer_,
                         .handle_mem = handle_mem_.bytes(),
                         .stream = memory_.stream(),
                         .grad_out = rows_tensor(inputs.grad_out, options_.tokens),
                         .recv_weights = floats(by_row_.recv_weights),
                         .grad_expert_out = rows_tensor(by_row_.grad_expert_out, rows_)};
  if (with_weight_gradients) {
    args.expert_out = rows_tensor(expert_rows_.expert_out, rows_);
    args.grad_recv_weights = floats(by_row_.grad_recv_weights);
  }
  group_.combine_bwd(args);
}

void MeasuredGroup::combine_bwd(const TokenTensors& inputs) {
  run_combine_bwd(inputs, true);
}

void MeasuredGroup::dispatch_bwd() {
  if (options_.is_rank_major()) return dispatch_rank_major_bwd();
  group_.dispatch_bwd(
      {.layer = layer_,
       .handle_mem = handle_mem_.bytes(),
       .stream = memory_.stream(),
       .grad_recv = rows_tensor(expert_rows_.grad_recv, rows_),
       .grad_recv_weights = floats(expert_rows_.grad_recv_weights),
       .grad_tokens = rows_tensor(by_token_.grad_tokens, options_.tokens),
       .grad_topk_weights = {by_token_.grad_topk_weights.data(), EPX_FLOAT32, {options_.tokens, options_.top_k}},
       .format = epx::row_format(options_.sum_format)});
}

void MeasuredGroup::dispatch_rank_major(const TokenTensors& inputs) {
  const Shape routes(options_.tokens, options_.top_k);
  group_.dispatch_rank_major(
      {.layer = layer_,
       .handle_mem = handle_mem_.bytes(),
       .stream = memory_.stream(),
       .tokens = rows_tensor(inputs.tokens, tokens_dtype(options_), options_.tokens),
       .topk_idx = {inputs.topk_idx.data(), EPX_INT64, routes},
       .topk_weights = {inputs.topk_weights.data(), EPX_FLOAT32, routes},
       .recv_tokens = by_source(by_row_.recv_tokens, recv_tokens_dtype(options_), options_.hidden),
       .recv_topk_idx = by_source(by_row_.recv_topk_idx, EPX_INT64, options_.top_k),
       .recv_weights = by_source(by_row_.recv_weights, EPX_FLOAT32, options_.top_k),
       .counts = integers(by_row_.source_counts),
       .format = format_of(inputs),
       .row_spacing = options_.layout == Layout::RankMajorCompact ? EPX_ROWS_COMPACT : EPX_ROWS_STRIDED});
}

void MeasuredGroup::combine_rank_major() {
  group_.combine_rank_major({.layer = layer_,
                             .handle_mem = handle_mem_.bytes(),
                             .stream = memory_.stream(),
                             .expert_out = by_source(expert_rows_.expert_out, options_.dtype, options_.hidden),
                             .out = rows_tensor(by_token_.out, options_.tokens),
                             .format = epx::row_format(options_.sum_format)});
}

void MeasuredGroup::combine_rank_major_bwd(const TokenTensors& inputs) {
  group_.combine_rank_major_bwd({.layer = layer_,
                                 .handle_mem = handle_mem_.bytes(),
                                 .stream = memory_.stream(),
                                 .grad_out = rows_tensor(inputs.grad_out, options_.tokens),
                                 .grad_expert_out = by_source(by_row_.grad_expert_out, options_.dtype, options_.hidden)});
}

void MeasuredGroup::dispatch_rank_major_bwd() {
  group_.dispatch_rank_major_bwd(
      {.layer = layer_,
       .handle_mem = handle_mem_.bytes(),
       .stream = memory_.stream(),
       .grad_recv = by_source(expert_rows_.grad_recv, options_.dtype, options_.hidden),
       .grad_recv_weights = by_source(expert_rows_.grad_recv_weights, EPX_FLOAT32, options_.top_k),
       .grad_tokens = rows_tensor(by_token_.grad_tokens, options_.tokens),
       .grad_topk_weights = {by_token_.grad_topk_weights.data(), EPX_FLOAT32, {options_.tokens, options_.top_k}},
       .format = epx::row_format(options_.sum_format)});
}

void MeasuredGroup::call(const Line& line, const TokenTensors& inputs) {
  switch (line.operation) {
  case EPX_OP_PREPARE:
    return prepare(inputs);
  case EPX_OP_DISPATCH:
    return dispatch(inputs);
  case EPX_OP_COMBINE:
    return combine();
  case EPX_OP_COMBINE_BWD:
    return run_combine_bwd(inputs, line.has_weight_gradients);
  case EPX_OP_DISPATCH_BWD:
    return dispatch_bwd();
  case EPX_OP_PREPARE_DISPATCH:
    run_prepare_dispatch(inputs, false);
    if (line.is_followed_by_combine) combine();
    return;
  default:
    if (!options_.is_rank_major()) prepare(inputs);
    dispatch(inputs);
    combine();
  }
}

void MeasuredGroup::finish() {
  memory_.finish();
  const epx_group_report report = group_.status();
  for (int kind = 0; kind < EPX_MAX_EVENT_KINDS; ++kind)
    events_[kind] += report.event_counts[kind];
  if (report.status != EPX_SUCCESS)
    throw RuntimeError(fmt::format("{}: {}", epx_status_string(report.status), report.message));
}

PrepareOutputs MeasuredGroup::prepared() const {
  PrepareOutputs outputs{.counts = prepared_.counts.read<int64_t>(),
                         .offsets = prepared_.offsets.read<int64_t>(),
                         .global_counts = prepared_.global_counts.read<int64_t>(),
                         .slot = prepared_.slot.read<int32_t>(),
                         .slot_origin = prepared_.slot_origin.read<int32_t>()};
  std::ranges::copy(prepared_.info.read<int64_t>(), outputs.info.begin());
  return outputs;
}

void MeasuredGroup::scribble() {
  for (const Buffer* buffer :
       {&prepared_.counts, &prepared_.offsets, &prepared_.global_counts, &prepared_.info, &prepared_.slot,
        &prepared_.slot_origin, &by_row_.recv_tokens, &by_row_.recv_weights, &by_row_.grad_expert_out,
        &by_row_.grad_recv_weights, &by_row_.recv_topk_idx, &by_row_.source_counts, &by_row_.recv_scales,
        &by_row_.recv_row_scales, &by_token_.out, &by_token_.grad_tokens, &by_token_.grad_topk_weights})
    buffer->fill(kScribble);
}

} // namespace epx::bench
