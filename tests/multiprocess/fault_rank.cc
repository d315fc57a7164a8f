// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/fault_rank.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/support/check.h"
#include "tests/support/launcher.h"

namespace epx::test {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kTokens = 4;
constexpr int64_t kRecvRows = 256; // N; more than the group can need
constexpr size_t kTensorBytes = 1 << 15;
constexpr int kNumTensors = 8;
constexpr std::chrono::seconds kAtOnce{5}; // a call that must not wait at all may take this long on a busy machine

constexpr epx_operation kRankMajorOperations[] = {EPX_OP_DISPATCH_RANK_MAJOR, EPX_OP_COMBINE_RANK_MAJOR,
                                                  EPX_OP_COMBINE_RANK_MAJOR_BWD, EPX_OP_DISPATCH_RANK_MAJOR_BWD};

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
  check_ok(call(EPX_OP_PREPARE), "epx_prepare");
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
  handle_bytes_ = GroupView(group_).handle_mem_size({shape.max_top_k, shape.max_alignment});
  num_local_experts_ = GroupView(group_).query().num_local_experts;
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

epx_status FaultRank::call(epx_operation operation, const CallFields& terms) {
  epx_status status = EPX_ERROR_INTERNAL;
  void* memory = nullptr;
  std::vector<int> records(static_cast<size_t>(num_ranks_));
  if (operation == EPX_OP_MEM_ALLOC)
    status = epx_mem_alloc(group_, 4096, &memory);
  else if (operation == EPX_OP_ALL_GATHER)
    status = epx_group_all_gather(group_, &num_ranks_, records.data(), sizeof(num_ranks_));
  else if (operation == EPX_OP_RAGGED_ALL_TO_ALL)
    status = ragged_all_to_all(terms);
  else
    status = layer(operation, terms).try_call(group_, operation);
  device_.finish();
  return status;
}

epx_status FaultRank::ragged_all_to_all(const CallFields& terms) {
  const epx_tensor operand = epx_tensor_2d(memory_[kTokenRows], terms.dtype, kTokens, terms.hidden);
  const epx_tensor output = epx_tensor_2d(memory_[kOtherRows], terms.dtype, kTokens, terms.hidden);
  const epx_tensor zeros =
      epx_tensor_1d(memory_[kIntegers] + kTensorBytes / 2, EPX_INT32, int64_t{num_ranks_} * terms.slices_per_rank);
  epx_ragged_all_to_all_args args{};
  args.struct_size = sizeof(args);
  args.stream = device_.stream();
  args.operand = &operand;
  args.output = &output;
  args.input_offsets = args.send_sizes = args.output_offsets = args.recv_sizes = &zeros;
  args.direction = terms.direction;
  return epx_ragged_all_to_all(group_, &args);
}

// The rows come as float32. Those that arrive quantised have one scale.
void FaultRank::pass_format(const CallFields& terms, int64_t rows, LayerMemory& layer) {
  if (terms.scaling == EPX_SCALING_NONE) return;
  check_ok(epx_row_format_init(&format_, terms.scaling), "epx_row_format_init");
  format_.dtype = terms.elements;
  format_.amax_floor = terms.amax_floor;
  layer.format = layer.sum_format = &format_;
  if (terms.scales == EPX_DTYPE_UNSET) return;
  recv_scales_ = epx_tensor_2d(memory_[kOtherRows] + kTensorBytes / 2, terms.scales, rows, 1);
  format_.recv_scales = &recv_scales_;
  layer.recv_dtype = terms.elements;
}

LayerMemory FaultRank::layer(epx_operation operation, const CallFields& terms) {
  const bool is_rank_major = std::ranges::count(kRankMajorOperations, operation) > 0;
  LayerMemory layer{.layer = {terms.top_k, is_rank_major ? 1 : terms.alignment},
                    .handle_mem = {memory_[kHandle], handle_bytes_},
                    .stream = device_.stream(),
                    .dtype = terms.dtype,
                    .num_tokens = kTokens,
                    .hidden = terms.hidden,
                    .num_rows = kRecvRows,
                    .num_local_experts = num_local_experts_,
                    .zone_stride = terms.zone_stride,
                    .num_ranks = num_ranks_,
                    .rows_per_source = terms.rows_per_source,
                    .row_spacing = terms.row_spacing,
                    .sidecar_bytes = terms.sidecar_bytes};
  layer.topk_idx = memory_[kIntegers]; // zeros: all to expert 0
  layer.counts = is_rank_major ? memory_[kOtherFloats] : memory_[kIntegers] + 1024;
  layer.offsets = memory_[kIntegers] + 2048;
  layer.sidecar = memory_[kIntegers] + 4096;
  layer.recv_sidecar = layer.recv_topk_idx = layer.grad_expert_out = memory_[kOtherRows];
  layer.tokens = layer.out = layer.grad_out = layer.grad_tokens = memory_[kTokenRows];
  layer.recv_tokens = layer.expert_out = layer.grad_recv = memory_[kSlotRows];
  pass_format(terms, is_rank_major ? int64_t{num_ranks_} * terms.rows_per_source : kRecvRows, layer);
  if (terms.weights) {
    layer.topk_weights = memory_[kTokenFloats];
    layer.recv_weights = layer.expert_weights = layer.bwd_weights = memory_[kSlotFloats];
  }
  if (terms.grads) {
    layer.bwd_expert_out = memory_[kSlotRows];
    layer.grad_recv_weights = memory_[kOtherFloats];
    layer.grad_weights = memory_[kSlotFloats];
    layer.grad_topk_weights = memory_[kTokenFloats];
  }
  return layer;
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
                                    "all_gather",
                                    "ragged_all_to_all"};
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
  check_says(message, operation_name(expected.operation));
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
  for (const epx_operation operation : {EPX_OP_PREPARE, EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD,
                                        EPX_OP_DISPATCH_BWD, EPX_OP_DISPATCH_RANK_MAJOR, EPX_OP_PREPARE_DISPATCH,
                                        EPX_OP_RAGGED_ALL_TO_ALL, EPX_OP_MEM_ALLOC, EPX_OP_ALL_GATHER}) {
    const bool needs_one_node = operation == EPX_OP_DISPATCH_RANK_MAJOR || operation == EPX_OP_RAGGED_ALL_TO_ALL;
    if (needs_one_node && has_several_nodes) continue; // it is refused in any case
    check_status(rank.call(operation), expected.status, fmt::format("epx_{} after the failure", operation_name(operation)));
  }
  check(Clock::now() - begin < kAtOnce, "calls after the failure wait for something");
  check(GroupView(rank.group()).status().status == expected.status, "reading the status cleared the failure");
  return report;
}

void with_ranks(int num_ranks, const std::function<void(const RankContext&)>& fn) {
  const int64_t before = num_checks();
  make_thread_launcher("host", num_ranks)->each_rank(fn);
  check(num_checks() > before, "no rank has made a check");
}

void wait_until(const std::function<bool()>& holds) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (!holds()) {
    check(Clock::now() < deadline, "the test waits for something that does not come");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

} // namespace epx::test
