#include "tools/ep_bench/exchange.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

void check(epx_status status, const char* call) {
  if (status != EPX_SUCCESS)
    throw RuntimeError(fmt::format("{}: {}: {}", call, epx_status_string(status), epx_last_error()));
}

epx_tensor vector_tensor(const Buffer& buffer) {
  return epx_tensor_1d(buffer.data(), EPX_INT64, static_cast<int64_t>(buffer.size() / sizeof(int64_t)));
}

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

} // namespace

epx_group_config group_config(const Options& options) {
  epx_group_config config;
  check(epx_group_config_init(&config), "epx_group_config_init");
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
  if (options.timeout_ms > 0) config.timeout_ms = options.timeout_ms;
  return config;
}

Exchange::Exchange(const epx_bootstrap& bootstrap, const Options& options, Memory& memory)
    : options_(options), memory_(memory), layer_{.top_k = options.top_k, .alignment = options.alignment} {
  using std::chrono::steady_clock;
  const epx_group_config config = group_config(options);
  epx_group group = nullptr;
  const steady_clock::time_point begin = steady_clock::now();
  check(epx_group_create(&bootstrap, &config, &group), "epx_group_create");
  creation_ms_ = std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
  group_.reset(group);

  info_.struct_size = sizeof(info_);
  check(epx_group_query(group, &info_), "epx_group_query");
  size_t handle_mem_bytes = 0;
  check(epx_handle_mem_size(group, &layer_, &handle_mem_bytes), "epx_handle_mem_size");
  handle_mem_ = Buffer::plain(memory, handle_mem_bytes);

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

void Exchange::allocate_rows(int64_t rows) {
  const auto allocate = [this](size_t bytes) {
    return options_.staged ? Buffer::plain(memory_, bytes) : Buffer::window(memory_, group_.get(), bytes);
  };
  rows_ = rows;
  by_row_.recv_tokens = allocate(rows * row_bytes(options_));
  by_row_.recv_weights = allocate(rows * sizeof(float));
  by_row_.grad_expert_out = allocate(rows * row_bytes(options_));
  by_row_.grad_recv_weights = allocate(rows * sizeof(float));
  expert_rows_.expert_out = allocate(rows * row_bytes(options_));
  expert_rows_.grad_recv = allocate(rows * row_bytes(options_));
  expert_rows_.grad_recv_weights = allocate(rows * sizeof(float));
}

TokenTensors Exchange::tensors_of(const TokenInputs& inputs) const {
  return {.topk_idx = Buffer::input(memory_, bytes_of(inputs.topk_idx)),
          .topk_weights = Buffer::input(memory_, bytes_of(inputs.topk_weights)),
          .tokens = Buffer::input(memory_, bytes_of(inputs.tokens)),
          .grad_out = Buffer::input(memory_, bytes_of(inputs.grad_out))};
}

void Exchange::load(const RowInputs& inputs) {
  expert_rows_.expert_out.write(inputs.expert_out);
  expert_rows_.grad_recv.write(inputs.grad_recv);
  expert_rows_.grad_recv_weights.write(inputs.grad_recv_weights);
}

void Exchange::load_recv_weights(const std::vector<float>& recv_weights) {
  by_row_.recv_weights.write(recv_weights);
}

template <typename Args>
Args Exchange::args() const {
  Args args{};
  args.struct_size = sizeof(args);
  args.layer = layer_;
  args.handle_mem = handle_mem_.data();
  args.handle_mem_bytes = handle_mem_.size();
  args.stream = memory_.stream();
  return args;
}

epx_tensor Exchange::rows_tensor(const Buffer& buffer, int64_t rows) const {
  return epx_tensor_2d(buffer.data(), options_.dtype, rows, options_.hidden);
}

epx_tensor Exchange::recv_weights_tensor() const {
  return epx_tensor_1d(by_row_.recv_weights.data(), EPX_FLOAT32, rows_);
}

void Exchange::run_prepare(const TokenTensors& inputs, bool every_output) {
  const int64_t tokens = options_.tokens, top_k = options_.top_k;
  const epx_tensor topk_idx = epx_tensor_2d(inputs.topk_idx.data(), EPX_INT64, tokens, top_k);
  const epx_tensor counts = vector_tensor(prepared_.counts);
  const epx_tensor offsets = vector_tensor(prepared_.offsets);
  const epx_tensor global_counts =
      epx_tensor_2d(prepared_.global_counts.data(), EPX_INT64, info_.num_ranks, options_.experts);
  const epx_tensor info = vector_tensor(prepared_.info);
  const epx_tensor slot = epx_tensor_2d(prepared_.slot.data(), EPX_INT32, tokens, top_k);
  const epx_tensor slot_origin = epx_tensor_2d(prepared_.slot_origin.data(), EPX_INT32, info_.max_recv_tokens_per_rank, 3);

  auto call = args<epx_prepare_args>();
  call.topk_idx = &topk_idx;
  call.counts = &counts;
  call.offsets = &offsets;
  if (every_output) {
    call.global_counts = &global_counts;
    call.info = &info;
    call.slot = &slot;
    call.slot_origin = &slot_origin;
  }
  check(epx_prepare(group_.get(), &call), "epx_prepare");
}

void Exchange::prepare(const TokenTensors& inputs) {
  run_prepare(inputs, false);
}
void Exchange::prepare_fully(const TokenTensors& inputs) {
  run_prepare(inputs, true);
}

void Exchange::dispatch(const TokenTensors& inputs) {
  const epx_tensor tokens = rows_tensor(inputs.tokens, options_.tokens);
  const epx_tensor topk_weights = epx_tensor_2d(inputs.topk_weights.data(), EPX_FLOAT32, options_.tokens, options_.top_k);
  const epx_tensor recv_tokens = rows_tensor(by_row_.recv_tokens, rows_);
  const epx_tensor recv_weights = recv_weights_tensor();
  auto call = args<epx_dispatch_args>();
  call.tokens = &tokens;
  call.topk_weights = &topk_weights;
  call.recv_tokens = &recv_tokens;
  call.recv_weights = &recv_weights;
  check(epx_dispatch(group_.get(), &call), "epx_dispatch");
}

void Exchange::combine() {
  const epx_tensor expert_out = rows_tensor(expert_rows_.expert_out, rows_);
  const epx_tensor recv_weights = recv_weights_tensor();
  const epx_tensor out = rows_tensor(by_token_.out, options_.tokens);
  auto call = args<epx_combine_args>();
  call.expert_out = &expert_out;
  call.recv_weights = &recv_weights;
  call.out = &out;
  check(epx_combine(group_.get(), &call), "epx_combine");
}

void Exchange::run_combine_bwd(const TokenTensors& inputs, bool with_weight_gradients) {
  const epx_tensor grad_out = rows_tensor(inputs.grad_out, options_.tokens);
  const epx_tensor expert_out = rows_tensor(expert_rows_.expert_out, rows_);
  const epx_tensor recv_weights = recv_weights_tensor();
  const epx_tensor grad_expert_out = rows_tensor(by_row_.grad_expert_out, rows_);
  const epx_tensor grad_recv_weights = epx_tensor_1d(by_row_.grad_recv_weights.data(), EPX_FLOAT32, rows_);
  auto call = args<epx_combine_bwd_args>();
  call.grad_out = &grad_out;
  call.recv_weights = &recv_weights;
  call.grad_expert_out = &grad_expert_out;
  if (with_weight_gradients) {
    call.expert_out = &expert_out;
    call.grad_recv_weights = &grad_recv_weights;
  }
  check(epx_combine_bwd(group_.get(), &call), "epx_combine_bwd");
}

void Exchange::combine_bwd(const TokenTensors& inputs) {
  run_combine_bwd(inputs, true);
}

void Exchange::dispatch_bwd() {
  const epx_tensor grad_recv = rows_tensor(expert_rows_.grad_recv, rows_);
  const epx_tensor grad_recv_weights = epx_tensor_1d(expert_rows_.grad_recv_weights.data(), EPX_FLOAT32, rows_);
  const epx_tensor grad_tokens = rows_tensor(by_token_.grad_tokens, options_.tokens);
  const epx_tensor grad_topk_weights =
      epx_tensor_2d(by_token_.grad_topk_weights.data(), EPX_FLOAT32, options_.tokens, options_.top_k);
  auto call = args<epx_dispatch_bwd_args>();
  call.grad_recv = &grad_recv;
  call.grad_recv_weights = &grad_recv_weights;
  call.grad_tokens = &grad_tokens;
  call.grad_topk_weights = &grad_topk_weights;
  check(epx_dispatch_bwd(group_.get(), &call), "epx_dispatch_bwd");
}

void Exchange::call(const Line& line, const TokenTensors& inputs) {
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
  default:
    prepare(inputs);
    dispatch(inputs);
    combine();
  }
}

void Exchange::finish() {
  memory_.finish();
  epx_group_report report{};
  report.struct_size = sizeof(report);
  check(epx_group_status(group_.get(), &report), "epx_group_status");
  for (int kind = 0; kind < EPX_MAX_EVENT_KINDS; ++kind)
    events_[kind] += report.event_counts[kind];
  if (report.status != EPX_SUCCESS)
    throw RuntimeError(fmt::format("{}: {}", epx_status_string(report.status), report.message));
}

PrepareOutputs Exchange::prepared() const {
  PrepareOutputs outputs{.counts = prepared_.counts.read<int64_t>(),
                         .offsets = prepared_.offsets.read<int64_t>(),
                         .global_counts = prepared_.global_counts.read<int64_t>(),
                         .slot = prepared_.slot.read<int32_t>(),
                         .slot_origin = prepared_.slot_origin.read<int32_t>()};
  std::ranges::copy(prepared_.info.read<int64_t>(), outputs.info.begin());
  return outputs;
}

void Exchange::poison() {
  for (const Buffer* buffer :
       {&prepared_.counts, &prepared_.offsets, &prepared_.global_counts, &prepared_.info, &prepared_.slot,
        &prepared_.slot_origin, &by_row_.recv_tokens, &by_row_.recv_weights, &by_row_.grad_expert_out,
        &by_row_.grad_recv_weights, &by_token_.out, &by_token_.grad_tokens, &by_token_.grad_topk_weights})
    buffer->fill(kPoison);
}

} // namespace epx::bench
