// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/fault_rank.h"

#include <chrono>

#include "tests/support/call_args.h"
#include "tests/support/check.h"

namespace epx::test {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kTokens = 4;
constexpr int64_t kRecvRows = 256; // N; more than the group can need
constexpr size_t kTensorBytes = 1 << 15;
constexpr int kNumTensors = 8;
constexpr std::chrono::seconds kAtOnce{5}; // a call that must not wait at all may take this long on a busy machine

// A tensor lies in one of these allocations.
enum : int { kHandle, kTokenRows, kTokenFloats, kSlotRows, kSlotFloats, kOtherRows, kOtherFloats, kIntegers };

GroupCase fault_group(int num_ranks, int64_t timeout_ms) {
  GroupCase group;
  group.num_ranks = num_ranks;
  group.num_experts = 4;
  group.max_tokens = kTokens;
  group.hidden_dim = 16;
  group.max_top_k = 4;
  group.max_alignment = 8;
  group.max_sidecar_bytes = 16;
  group.timeout_ms = timeout_ms;
  return group;
}

} // namespace

FaultRank::FaultRank(const RankContext& context, int64_t timeout_ms, int ranks_per_node, bool has_fixed_rail_tokens)
    : FaultRank(context, timeout_ms, MayFail{}, ranks_per_node, has_fixed_rail_tokens) {
  check_ok(created_, "epx_group_create");
}

FaultRank::FaultRank(const RankContext& context, int64_t timeout_ms, MayFail /*unused*/, int ranks_per_node,
                     bool has_fixed_rail_tokens)
    : num_ranks_(context.num_ranks), device_(*context.device) {
  GroupCase shape = fault_group(context.num_ranks, timeout_ms);
  shape.transport = device_.transport();
  shape.ranks_per_node = ranks_per_node;
  if (has_fixed_rail_tokens) shape.fixed_rail_tokens = shape.max_tokens;
  const epx_group_config config = make_config(shape);
  created_ = epx_group_create(context.bootstrap, &config, &group_);
  if (created_ != EPX_SUCCESS) return;
  const epx_layer largest = {shape.max_top_k, shape.max_alignment};
  check_ok(epx_handle_mem_size(group_, &largest, &handle_bytes_), "epx_handle_mem_size");
  check(handle_bytes_ <= kTensorBytes, "handle memory takes {} bytes", handle_bytes_);
  const std::vector<std::byte> zeros(kTensorBytes);
  for (int i = 0; i < kNumTensors; ++i) {
    memory_.push_back(device_.allocate(kTensorBytes));
    device_.write(memory_.back(), zeros.data(), zeros.size());
  }
}

FaultRank::~FaultRank() {
  epx_group_destroy(group_);
  for (std::byte* memory : memory_)
    device_.free(memory);
}

void FaultRank::destroy() {
  const auto begin = Clock::now();
  epx_group_destroy(group_);
  group_ = nullptr;
  check(Clock::now() - begin < kAtOnce, "epx_group_destroy waited for something");
}

void FaultRank::prepare() {
  check_ok(call(EPX_OP_PREPARE), "epx_prepare");
}

epx_status FaultRank::call(epx_operation operation, const CallFields& terms) {
  epx_status status = EPX_ERROR_INTERNAL;
  void* memory = nullptr;
  std::vector<int> records(static_cast<size_t>(num_ranks_));
  switch (operation) {
  case EPX_OP_PREPARE:
    status = call_prepare(terms);
    break;
  case EPX_OP_DISPATCH:
    status = call_dispatch(terms);
    break;
  case EPX_OP_PREPARE_DISPATCH:
    status = call_prepare_dispatch(terms);
    break;
  case EPX_OP_COMBINE:
    status = call_combine(terms);
    break;
  case EPX_OP_COMBINE_BWD:
    status = call_combine_bwd(terms);
    break;
  case EPX_OP_DISPATCH_BWD:
    status = call_dispatch_bwd(terms);
    break;
  case EPX_OP_DISPATCH_RANK_MAJOR:
    status = call_dispatch_rank_major(terms);
    break;
  case EPX_OP_MEM_ALLOC:
    status = epx_mem_alloc(group_, 4096, &memory);
    break;
  case EPX_OP_ALL_GATHER:
    status = epx_group_all_gather(group_, &num_ranks_, records.data(), sizeof(num_ranks_));
    break;
  default:
    fail_check("no such call");
  }
  device_.finish();
  return status;
}

template <typename Args>
Args FaultRank::make_args(const CallFields& terms) {
  return make_call_args<Args>({terms.top_k, terms.alignment}, memory_[kHandle], handle_bytes_, device_.stream());
}

epx_tensor FaultRank::rows(int64_t count, const CallFields& terms, int which) {
  return epx_tensor_2d(memory_[static_cast<size_t>(which)], terms.dtype, count, terms.hidden);
}

epx_tensor FaultRank::floats(int64_t count, int64_t per_row, int which) {
  std::byte* data = memory_[static_cast<size_t>(which)];
  return per_row == 0 ? epx_tensor_1d(data, EPX_FLOAT32, count) : epx_tensor_2d(data, EPX_FLOAT32, count, per_row);
}

epx_status FaultRank::call_prepare(const CallFields& terms) {
  epx_group_info info = {};
  info.struct_size = sizeof(info);
  check_ok(epx_group_query(group_, &info), "epx_group_query");
  auto args = make_args<epx_prepare_args>(terms);
  std::byte* integers = memory_[kIntegers];
  const epx_tensor topk_idx = epx_tensor_2d(integers, EPX_INT32, kTokens, terms.top_k); // zeros: all to expert 0
  const epx_tensor counts = epx_tensor_1d(integers + 1024, EPX_INT32, info.num_local_experts);
  const epx_tensor offsets = epx_tensor_1d(integers + 2048, EPX_INT32, info.num_local_experts + 1);
  args.topk_idx = &topk_idx;
  args.counts = &counts;
  args.offsets = &offsets;
  return epx_prepare(group_, &args);
}

epx_status FaultRank::call_dispatch(const CallFields& terms) {
  auto args = make_args<epx_dispatch_args>(terms);
  epx_tensor tokens = rows(kTokens, terms, kTokenRows);
  epx_tensor recv_tokens = rows(kRecvRows, terms, kSlotRows);
  const epx_tensor topk_weights = floats(kTokens, terms.top_k, kTokenFloats);
  const epx_tensor recv_weights = floats(kRecvRows, 0, kSlotFloats);
  if (terms.sidecar_bytes > 0) {
    tokens.sidecar = memory_[kIntegers] + 4096;
    recv_tokens.sidecar = memory_[kOtherRows];
    tokens.sidecar_row_bytes = recv_tokens.sidecar_row_bytes = terms.sidecar_bytes;
  }
  args.tokens = &tokens;
  args.recv_tokens = &recv_tokens;
  args.topk_weights = terms.weights ? &topk_weights : nullptr;
  args.recv_weights = terms.weights ? &recv_weights : nullptr;
  return epx_dispatch(group_, &args);
}

epx_status FaultRank::call_prepare_dispatch(const CallFields& terms) {
  epx_group_info info = {};
  info.struct_size = sizeof(info);
  check_ok(epx_group_query(group_, &info), "epx_group_query");
  auto args = make_args<epx_prepare_dispatch_args>(terms);
  std::byte* integers = memory_[kIntegers];
  const epx_tensor topk_idx = epx_tensor_2d(integers, EPX_INT32, kTokens, terms.top_k); // zeros: all to expert 0
  const epx_tensor counts = epx_tensor_1d(integers + 1024, EPX_INT32, info.num_local_experts);
  const epx_tensor offsets = epx_tensor_1d(integers + 2048, EPX_INT32, info.num_local_experts + 1);
  const epx_tensor tokens = rows(kTokens, terms, kTokenRows), recv_tokens = rows(kRecvRows, terms, kSlotRows);
  const epx_tensor topk_weights = floats(kTokens, terms.top_k, kTokenFloats);
  const epx_tensor recv_weights = floats(kRecvRows, 0, kSlotFloats);
  args.topk_idx = &topk_idx;
  args.counts = &counts;
  args.offsets = &offsets;
  args.tokens = &tokens;
  args.topk_weights = terms.weights ? &topk_weights : nullptr;
  args.recv_tokens = &recv_tokens;
  args.recv_weights = terms.weights ? &recv_weights : nullptr;
  return epx_prepare_dispatch(group_, &args);
}

epx_status FaultRank::call_combine(const CallFields& terms) {
  auto args = make_args<epx_combine_args>(terms);
  const epx_tensor expert_out = rows(kRecvRows, terms, kSlotRows);
  const epx_tensor recv_weights = floats(kRecvRows, 0, kSlotFloats);
  const epx_tensor out = rows(kTokens, terms, kTokenRows);
  args.expert_out = &expert_out;
  args.recv_weights = terms.weights ? &recv_weights : nullptr;
  args.out = &out;
  return epx_combine(group_, &args);
}

epx_status FaultRank::call_combine_bwd(const CallFields& terms) {
  auto args = make_args<epx_combine_bwd_args>(terms);
  const epx_tensor grad_out = rows(kTokens, terms, kTokenRows);
  const epx_tensor expert_out = rows(kRecvRows, terms, kSlotRows);
  const epx_tensor recv_weights = floats(kRecvRows, 0, kSlotFloats);
  const epx_tensor grad_expert_out = rows(kRecvRows, terms, kOtherRows);
  const epx_tensor grad_recv_weights = floats(kRecvRows, 0, kOtherFloats);
  args.grad_out = &grad_out;
  args.expert_out = terms.grads ? &expert_out : nullptr;
  args.recv_weights = terms.weights ? &recv_weights : nullptr;
  args.grad_expert_out = &grad_expert_out;
  args.grad_recv_weights = terms.grads ? &grad_recv_weights : nullptr;
  return epx_combine_bwd(group_, &args);
}

epx_status FaultRank::call_dispatch_bwd(const CallFields& terms) {
  auto args = make_args<epx_dispatch_bwd_args>(terms);
  const epx_tensor grad_recv = rows(kRecvRows, terms, kSlotRows);
  const epx_tensor grad_recv_weights = floats(kRecvRows, 0, kSlotFloats);
  const epx_tensor grad_tokens = rows(kTokens, terms, kTokenRows);
  const epx_tensor grad_topk_weights = floats(kTokens, terms.top_k, kTokenFloats);
  args.grad_recv = &grad_recv;
  args.grad_recv_weights = terms.grads ? &grad_recv_weights : nullptr;
  args.grad_tokens = &grad_tokens;
  args.grad_topk_weights = terms.grads ? &grad_topk_weights : nullptr;
  return epx_dispatch_bwd(group_, &args);
}

epx_status FaultRank::call_dispatch_rank_major(const CallFields& terms) {
  auto args = make_args<epx_dispatch_rank_major_args>(terms);
  args.layer.alignment = 1;
  const epx_tensor tokens = rows(kTokens, terms, kTokenRows);
  const epx_tensor topk_idx = epx_tensor_2d(memory_[kIntegers], EPX_INT32, kTokens, terms.top_k);
  const epx_tensor topk_weights = floats(kTokens, terms.top_k, kTokenFloats);
  const epx_tensor recv_tokens =
      epx_tensor_3d(memory_[kSlotRows], terms.dtype, num_ranks_, terms.rows_per_source, terms.hidden);
  const epx_tensor recv_topk_idx =
      epx_tensor_3d(memory_[kOtherRows], EPX_INT32, num_ranks_, terms.rows_per_source, terms.top_k);
  const epx_tensor recv_weights =
      epx_tensor_3d(memory_[kSlotFloats], EPX_FLOAT32, num_ranks_, terms.rows_per_source, terms.top_k);
  const epx_tensor counts = epx_tensor_1d(memory_[kOtherFloats], EPX_INT32, num_ranks_);
  args.tokens = &tokens;
  args.topk_idx = &topk_idx;
  args.topk_weights = terms.weights ? &topk_weights : nullptr;
  args.recv_tokens = &recv_tokens;
  args.recv_topk_idx = &recv_topk_idx;
  args.recv_weights = terms.weights ? &recv_weights : nullptr;
  args.counts = &counts;
  return epx_dispatch_rank_major(group_, &args);
}

const char* operation_name(epx_operation operation) {
  constexpr const char* kNames[] = {"none",
                                    "prepare",
                                    "dispatch",
                                    "combine",
                                    "combine_bwd",
                                    "dispatch_bwd",
                                    "mem_alloc",
                                    "mem_free",
                                    "dispatch_rank_major",
                                    "combine_rank_major",
                                    "combine_rank_major_bwd",
                                    "dispatch_rank_major_bwd",
                                    "prepare_dispatch",
                                    "all_gather"};
  return kNames[operation];
}

epx_group_report check_failed(FaultRank& rank, epx_status returned, const ExpectedFailure& expected) {
  const std::string sentence = epx_last_error();
  check_status(returned, expected.status, std::string("epx_") + operation_name(expected.operation));
  const epx_group_report report = GroupView(rank.group()).status();
  const std::string message = report.message;
  check(report.status == expected.status, "the report says {}, expected {}: \"{}\"", epx_status_string(report.status),
        epx_status_string(expected.status), message);
  check(!message.empty() && sentence == message, "the call says \"{}\", the report \"{}\"", sentence, message);
  check(contains(message, operation_name(expected.operation)), "\"{}\" does not name {}", message,
        operation_name(expected.operation));
  check(report.operation == expected.operation, "the report names operation {}, expected {}",
        operation_name(report.operation), operation_name(expected.operation));
  if (expected.culprit) {
    check(report.culprit == *expected.culprit, "culprit is {}, expected {}: \"{}\"", report.culprit, *expected.culprit,
          message);
  }
  if (expected.sequence) check_equal(report.sequence, *expected.sequence, "the failed call's number");

  const epx_group_info info = GroupView(rank.group()).query();
  const bool has_several_nodes = info.ranks_per_node < info.num_ranks;
  const auto begin = Clock::now();
  for (const epx_operation operation :
       {EPX_OP_PREPARE, EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD,
        EPX_OP_DISPATCH_RANK_MAJOR, EPX_OP_PREPARE_DISPATCH, EPX_OP_MEM_ALLOC, EPX_OP_ALL_GATHER}) {
    if (operation == EPX_OP_DISPATCH_RANK_MAJOR && has_several_nodes) continue; // it is refused in any case
    check_status(rank.call(operation), expected.status, fmt::format("epx_{} after the failure", operation_name(operation)));
  }
  check(Clock::now() - begin < kAtOnce, "calls after the failure wait for something");
  check(GroupView(rank.group()).status().status == expected.status, "reading the status cleared the failure");
  return report;
}

} // namespace epx::test
