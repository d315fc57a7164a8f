#include "tools/ep_bench/exchange.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

void check(epx_status status, const char* call) {
  if (status != EPX_SUCCESS)
    throw RuntimeError(fmt::format("{}: {}: {}", call, epx_status_string(status), epx_last_error()));
}

// Tensor descriptors do not tell inputs from outputs; epx only reads through those it documents as [in].
void* mutable_data(const void* data) {
  return const_cast<void*>(data);
}

epx_tensor vector_tensor(const std::vector<int64_t>& values) {
  return epx_tensor_1d(mutable_data(values.data()), EPX_INT64, static_cast<int64_t>(values.size()));
}

template <typename T>
void fill_poison(std::vector<T>& values) {
  if (!values.empty()) std::memset(values.data(), static_cast<int>(kPoison), values.size() * sizeof(T));
}

} // namespace

const char* name_of(epx_operation operation) {
  switch (operation) {
  case EPX_OP_PREPARE:
    return "prepare";
  case EPX_OP_DISPATCH:
    return "dispatch";
  case EPX_OP_COMBINE:
    return "combine";
  case EPX_OP_COMBINE_BWD:
    return "combine_bwd";
  case EPX_OP_DISPATCH_BWD:
    return "dispatch_bwd";
  default:
    return "none";
  }
}

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
  if (options.timeout_ms > 0) config.timeout_ms = options.timeout_ms;
  return config;
}

Exchange::Exchange(const epx_bootstrap& bootstrap, const Options& options)
    : options_(options), layer_{.top_k = options.top_k, .alignment = options.alignment} {
  const epx_group_config config = group_config(options);
  epx_group group = nullptr;
  check(epx_group_create(&bootstrap, &config, &group), "epx_group_create");
  group_.reset(group);

  info_.struct_size = sizeof(info_);
  check(epx_group_query(group, &info_), "epx_group_query");
  size_t handle_mem_bytes = 0;
  check(epx_handle_mem_size(group, &layer_, &handle_mem_bytes), "epx_handle_mem_size");
  handle_mem_.resize(handle_mem_bytes);

  const int64_t tokens = options.tokens, routes = tokens * options.top_k;
  prepared_.counts.resize(info_.num_local_experts);
  prepared_.offsets.resize(info_.num_local_experts + 1);
  prepared_.global_counts.resize(int64_t{info_.num_ranks} * options.experts);
  prepared_.slot.resize(routes);
  prepared_.slot_origin.resize(info_.max_recv_tokens_per_rank * 3);
  by_token_.out = Buffer::plain(tokens * row_bytes(options));
  by_token_.grad_tokens = Buffer::plain(tokens * row_bytes(options));
  by_token_.grad_topk_weights = Buffer::plain(routes * sizeof(float));
}

void Exchange::allocate_rows(int64_t rows) {
  const auto allocate = [this](size_t bytes) {
    return options_.staged ? Buffer::plain(bytes) : Buffer::window(group_.get(), bytes);
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

void Exchange::load(const RowInputs& inputs) {
  std::ranges::copy(inputs.expert_out, expert_rows_.expert_out.data());
  std::ranges::copy(inputs.grad_recv, expert_rows_.grad_recv.data());
  std::ranges::copy(inputs.grad_recv_weights, expert_rows_.grad_recv_weights.floats().begin());
}

void Exchange::load_recv_weights(const std::vector<float>& recv_weights) {
  std::ranges::copy(recv_weights, by_row_.recv_weights.floats().begin());
}

template <typename Args>
Args Exchange::args() const {
  Args args{};
  args.struct_size = sizeof(args);
  args.layer = layer_;
  args.handle_mem = const_cast<std::byte*>(handle_mem_.data()); // only prepare writes there
  args.handle_mem_bytes = handle_mem_.size();
  return args;
}

epx_tensor Exchange::rows_tensor(const void* data, int64_t rows) const {
  return epx_tensor_2d(mutable_data(data), options_.dtype, rows, options_.hidden);
}

epx_tensor Exchange::recv_weights_tensor() const {
  return epx_tensor_1d(by_row_.recv_weights.data(), EPX_FLOAT32, rows_);
}

void Exchange::run_prepare(const TokenInputs& inputs, bool every_output) {
  const int64_t tokens = options_.tokens, top_k = options_.top_k;
  const epx_tensor topk_idx = epx_tensor_2d(mutable_data(inputs.topk_idx.data()), EPX_INT64, tokens, top_k);
  const epx_tensor counts = vector_tensor(prepared_.counts);
  const epx_tensor offsets = vector_tensor(prepared_.offsets);
  const epx_tensor global_counts =
      epx_tensor_2d(prepared_.global_counts.data(), EPX_INT64, info_.num_ranks, options_.experts);
  const epx_tensor info = epx_tensor_1d(prepared_.info.data(), EPX_INT64, static_cast<int64_t>(prepared_.info.size()));
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

void Exchange::prepare(const TokenInputs& inputs) {
  run_prepare(inputs, false);
}
void Exchange::prepare_fully(const TokenInputs& inputs) {
  run_prepare(inputs, true);
}

void Exchange::dispatch(const TokenInputs& inputs) {
  const epx_tensor tokens = rows_tensor(inputs.tokens.data(), options_.tokens);
  const epx_tensor topk_weights =
      epx_tensor_2d(mutable_data(inputs.topk_weights.data()), EPX_FLOAT32, options_.tokens, options_.top_k);
  const epx_tensor recv_tokens = rows_tensor(by_row_.recv_tokens.data(), rows_);
  const epx_tensor recv_weights = recv_weights_tensor();
  auto call = args<epx_dispatch_args>();
  call.tokens = &tokens;
  call.topk_weights = &topk_weights;
  call.recv_tokens = &recv_tokens;
  call.recv_weights = &recv_weights;
  check(epx_dispatch(group_.get(), &call), "epx_dispatch");
}

void Exchange::combine() {
  const epx_tensor expert_out = rows_tensor(expert_rows_.expert_out.data(), rows_);
  const epx_tensor recv_weights = recv_weights_tensor();
  const epx_tensor out = rows_tensor(by_token_.out.data(), options_.tokens);
  auto call = args<epx_combine_args>();
  call.expert_out = &expert_out;
  call.recv_weights = &recv_weights;
  call.out = &out;
  check(epx_combine(group_.get(), &call), "epx_combine");
}

void Exchange::combine_bwd(const TokenInputs& inputs) {
  const epx_tensor grad_out = rows_tensor(inputs.grad_out.data(), options_.tokens);
  const epx_tensor expert_out = rows_tensor(expert_rows_.expert_out.data(), rows_);
  const epx_tensor recv_weights = recv_weights_tensor();
  const epx_tensor grad_expert_out = rows_tensor(by_row_.grad_expert_out.data(), rows_);
  const epx_tensor grad_recv_weights = epx_tensor_1d(by_row_.grad_recv_weights.data(), EPX_FLOAT32, rows_);
  auto call = args<epx_combine_bwd_args>();
  call.grad_out = &grad_out;
  call.expert_out = &expert_out;
  call.recv_weights = &recv_weights;
  call.grad_expert_out = &grad_expert_out;
  call.grad_recv_weights = &grad_recv_weights;
  check(epx_combine_bwd(group_.get(), &call), "epx_combine_bwd");
}

void Exchange::dispatch_bwd() {
  const epx_tensor grad_recv = rows_tensor(expert_rows_.grad_recv.data(), rows_);
  const epx_tensor grad_recv_weights = epx_tensor_1d(expert_rows_.grad_recv_weights.data(), EPX_FLOAT32, rows_);
  const epx_tensor grad_tokens = rows_tensor(by_token_.grad_tokens.data(), options_.tokens);
  const epx_tensor grad_topk_weights =
      epx_tensor_2d(by_token_.grad_topk_weights.data(), EPX_FLOAT32, options_.tokens, options_.top_k);
  auto call = args<epx_dispatch_bwd_args>();
  call.grad_recv = &grad_recv;
  call.grad_recv_weights = &grad_recv_weights;
  call.grad_tokens = &grad_tokens;
  call.grad_topk_weights = &grad_topk_weights;
  check(epx_dispatch_bwd(group_.get(), &call), "epx_dispatch_bwd");
}

void Exchange::call(epx_operation operation, const InputSet& inputs) {
  switch (operation) {
  case EPX_OP_PREPARE:
    return prepare(inputs.by_token);
  case EPX_OP_DISPATCH:
    return dispatch(inputs.by_token);
  case EPX_OP_COMBINE:
    return combine();
  case EPX_OP_COMBINE_BWD:
    return combine_bwd(inputs.by_token);
  case EPX_OP_DISPATCH_BWD:
    return dispatch_bwd();
  default:
    throw RuntimeError(fmt::format("operation {} is not one of the five", static_cast<int>(operation)));
  }
}

epx_group_report Exchange::status() {
  epx_group_report report{};
  report.struct_size = sizeof(report);
  check(epx_group_status(group_.get(), &report), "epx_group_status");
  return report;
}

void Exchange::poison() {
  fill_poison(prepared_.counts);
  fill_poison(prepared_.offsets);
  fill_poison(prepared_.global_counts);
  prepared_.info.fill(0xa5);
  fill_poison(prepared_.slot);
  fill_poison(prepared_.slot_origin);
  for (const Buffer* buffer :
       {&by_row_.recv_tokens, &by_row_.recv_weights, &by_row_.grad_expert_out, &by_row_.grad_recv_weights, &by_token_.out,
        &by_token_.grad_tokens, &by_token_.grad_topk_weights})
    std::ranges::fill(buffer->bytes(), kPoison);
}

} // namespace epx::bench
