// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/resident_layer.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "base/dtypes.h"
#include "tests/gpu/compare_kernel.h"
#include "tests/support/call_args.h"
#include "tests/support/check.h"
#include "tests/support/compare.h"
#include "tests/support/values.h"

namespace epx::test {

ResidentLayer::ResidentLayer(GroupRun& group, const LayerCase& layer, bool in_place)
    : group_(group), device_(group.device()), rank_(group.rank()), layer_(layer) {
  lay_out();
  if (in_place)
    for (const size_t written_by_peers : {kRecvTokens, kGradExpertOut, kRecvRows, kGradRows}) {
      if (memories_[written_by_peers].bytes == 0) continue;
      void* data = nullptr;
      check_ok(epx_mem_alloc(group_.handle(), memories_[written_by_peers].bytes, &data), "epx_mem_alloc");
      memories_[written_by_peers].data = static_cast<std::byte*>(data);
      memories_[written_by_peers].owner = Memory::group;
    }
  allocate_on_device();
}

ResidentLayer::ResidentLayer(GroupRun& group, const LayerCase& layer, std::byte* registered, size_t bytes)
    : group_(group), device_(group.device()), rank_(group.rank()), layer_(layer) {
  lay_out();
  for (const size_t written_by_peers : {kRecvTokens, kGradExpertOut, kRecvRows, kGradRows}) {
    Memory& memory = memories_[written_by_peers];
    check(memory.bytes <= bytes, "{} bytes do not fit in {}", memory.bytes, bytes);
    memory.data = registered;
    memory.owner = Memory::borrowed;
    const size_t used = (memory.bytes + 255) / 256 * 256;
    registered += used;
    bytes -= std::min(used, bytes);
  }
  allocate_on_device();
}

void ResidentLayer::allocate_on_device() {
  for (Memory& memory : memories_)
    if (memory.data == nullptr) memory.data = device_.allocate(std::max<size_t>(memory.bytes, 1));
}

void ResidentLayer::lay_out() {
  epx_layer_ = {layer_.top_k, layer_.alignment};
  num_tokens_ = group_.shape().max_tokens;
  recv_rows_ = recv_capacity(group_.shape());
  const GroupCase& shape = group_.shape();
  const bool is_rank_major = layer_.rank_major == RankMajorRows::max_tokens;
  rows_per_source_ = is_rank_major ? std::min(num_tokens_, recv_rows_ / (int64_t{shape.num_ranks} * layer_.top_k)) : 0;
  stream_ = device_.stream();
  memories_.resize(kNumMemories);
  size_t handle_bytes = 0;
  check_ok(epx_handle_mem_size(group_.handle(), &epx_layer_, &handle_bytes), "epx_handle_mem_size");
  const auto row = static_cast<size_t>(row_bytes(layer_.dtype, layer_.hidden));
  const auto tokens = static_cast<size_t>(num_tokens_), slots = static_cast<size_t>(recv_rows_);
  const size_t routes = tokens * static_cast<size_t>(layer_.top_k);
  const auto experts = static_cast<size_t>(group_.info().num_local_experts);
  const auto allocate = [&](size_t memory, size_t bytes, bool is_input) {
    memories_[memory].bytes = bytes;
    memories_[memory].is_input = is_input;
  };
  allocate(kTopkIdx, routes * sizeof(int64_t), true);
  allocate(kTokens, tokens * row, true);
  allocate(kTopkWeights, routes * sizeof(float), true);
  allocate(kExpertOut, slots * row, true);
  allocate(kCombineWeights, slots * sizeof(float), true);
  allocate(kGradOut, tokens * row, true);
  allocate(kBwdExpertOut, slots * row, true);
  allocate(kBwdWeights, slots * sizeof(float), true);
  allocate(kGradRecv, slots * row, true);
  allocate(kGradRecvWeightsIn, slots * sizeof(float), true);
  allocate(kHandle, handle_bytes, false);
  allocate(kCounts, experts * sizeof(int32_t), false);
  allocate(kOffsets, (experts + 1) * sizeof(int32_t), false);
  allocate(kRecvTokens, slots * row, false);
  allocate(kRecvWeights, slots * sizeof(float), false);
  allocate(kOut, tokens * row, false);
  allocate(kGradExpertOut, slots * row, false);
  allocate(kGradRecvWeights, slots * sizeof(float), false);
  allocate(kGradTokens, tokens * row, false);
  allocate(kGradTopkWeights, routes * sizeof(float), false);
  const auto source_rows = static_cast<size_t>(shape.num_ranks * rows_per_source_);
  const size_t row_routes = source_rows * static_cast<size_t>(layer_.top_k);
  const auto of_sums = [&](size_t bytes) { return is_rank_major && sums_rank_major() ? bytes : 0; };
  allocate(kRowTokens, is_rank_major ? tokens * row : 0, true);
  allocate(kRowTopkWeights, is_rank_major ? routes * sizeof(float) : 0, true);
  allocate(kRowGradOut, is_rank_major ? tokens * row : 0, true);
  allocate(kRowExpertOut, of_sums(source_rows * row), true);
  allocate(kGradRowsIn, of_sums(source_rows * row), true);
  allocate(kGradRowWeightsIn, of_sums(row_routes * sizeof(float)), true);
  allocate(kRowHandle, handle_bytes, false);
  allocate(kRecvRows, source_rows * row, false);
  allocate(kRecvRowIdx, row_routes * sizeof(int64_t), false);
  allocate(kRecvRowWeights, row_routes * sizeof(float), false);
  allocate(kSourceCounts, static_cast<size_t>(shape.num_ranks) * sizeof(int32_t), false);
  allocate(kRowOut, of_sums(tokens * row), false);
  allocate(kGradRows, source_rows * row, false);
  allocate(kRowGradTokens, of_sums(tokens * row), false);
  allocate(kRowGradTopkWeights, of_sums(routes * sizeof(float)), false);
}

ResidentLayer::~ResidentLayer() {
  for (const Memory& memory : memories_) {
    if (memory.owner == Memory::group) epx_mem_free(group_.handle(), memory.data);
    if (memory.owner == Memory::device) device_.free(memory.data);
  }
}

void ResidentLayer::write(const Workload& work) {
  const auto rank = static_cast<size_t>(rank_);
  const auto write_input = [&](size_t memory, const auto& values) {
    const auto bytes = std::as_bytes(std::span(values));
    check_equal(bytes.size(), memories_[memory].bytes, "bytes of input " + std::to_string(memory));
    device_.write(memories_[memory].data, bytes.data(), bytes.size());
  };
  write_input(kTopkIdx, work.routing[rank].topk_idx);
  write_input(kTokens, work.dispatch.tokens[rank].bytes);
  write_input(kTopkWeights, work.dispatch.topk_weights[rank]);
  write_input(kExpertOut, work.combine.expert_out[rank].bytes);
  write_input(kCombineWeights, work.combine.recv_weights[rank]);
  write_input(kGradOut, work.combine_bwd.grad_out[rank].bytes);
  write_input(kBwdExpertOut, work.combine_bwd.expert_out[rank].bytes);
  write_input(kBwdWeights, work.combine_bwd.recv_weights[rank]);
  write_input(kGradRecv, work.dispatch_bwd.grad_recv[rank].bytes);
  write_input(kGradRecvWeightsIn, work.dispatch_bwd.grad_recv_weights[rank]);
  if (work.rank_major) {
    check_equal(work.rank_major->rows_per_source, rows_per_source_, "M");
    write_input(kRowTokens, work.rank_major->dispatch.tokens[rank].bytes);
    write_input(kRowTopkWeights, work.rank_major->dispatch.topk_weights[rank]);
    write_input(kRowGradOut, work.rank_major->combine_bwd.grad_out[rank].bytes);
  }
  if (work.rank_major && sums_rank_major()) {
    write_input(kRowExpertOut, work.rank_major->combine.expert_out[rank].bytes);
    write_input(kGradRowsIn, work.rank_major->dispatch_bwd.grad_recv[rank].bytes);
    write_input(kGradRowWeightsIn, work.rank_major->dispatch_bwd.grad_recv_weights[rank]);
  }
  for (const Memory& memory : memories_) {
    if (memory.is_input) continue;
    const std::vector<std::byte> scribble(memory.bytes, kScribble);
    device_.write(memory.data, scribble.data(), scribble.size());
  }
}

epx_tensor ResidentLayer::rows(size_t memory, int64_t count) const {
  return epx_tensor_2d(memories_[memory].data, layer_.dtype, count, layer_.hidden);
}
epx_tensor ResidentLayer::floats(size_t memory, int64_t count, int64_t per_row) const {
  return per_row == 0 ? epx_tensor_1d(memories_[memory].data, EPX_FLOAT32, count)
                      : epx_tensor_2d(memories_[memory].data, EPX_FLOAT32, count, per_row);
}

template <typename Args>
Args ResidentLayer::make_args() const {
  return make_call_args<Args>(epx_layer_, memories_[kHandle].data, memories_[kHandle].bytes, stream_);
}

void ResidentLayer::prepare() {
  const int num_local_experts = group_.info().num_local_experts;
  const epx_tensor topk_idx = epx_tensor_2d(memories_[kTopkIdx].data, EPX_INT64, num_tokens_, layer_.top_k);
  const epx_tensor counts = epx_tensor_1d(memories_[kCounts].data, EPX_INT32, num_local_experts);
  const epx_tensor offsets = epx_tensor_1d(memories_[kOffsets].data, EPX_INT32, num_local_experts + 1);
  auto prepare = make_args<epx_prepare_args>();
  prepare.topk_idx = &topk_idx;
  prepare.counts = &counts;
  prepare.offsets = &offsets;
  check_ok(epx_prepare(group_.handle(), &prepare), "epx_prepare");
}

void ResidentLayer::dispatch() {
  const epx_tensor tokens = rows(kTokens, num_tokens_), recv_tokens = rows(kRecvTokens, recv_rows_);
  const epx_tensor topk_weights = floats(kTopkWeights, num_tokens_, layer_.top_k);
  const epx_tensor recv_weights = floats(kRecvWeights, recv_rows_, 0);
  auto dispatch = make_args<epx_dispatch_args>();
  dispatch.tokens = &tokens;
  dispatch.topk_weights = &topk_weights;
  dispatch.recv_tokens = &recv_tokens;
  dispatch.recv_weights = &recv_weights;
  check_ok(epx_dispatch(group_.handle(), &dispatch), "epx_dispatch");
}

void ResidentLayer::prepare_dispatch() {
  const int num_local_experts = group_.info().num_local_experts;
  const epx_tensor topk_idx = epx_tensor_2d(memories_[kTopkIdx].data, EPX_INT64, num_tokens_, layer_.top_k);
  const epx_tensor counts = epx_tensor_1d(memories_[kCounts].data, EPX_INT32, num_local_experts);
  const epx_tensor offsets = epx_tensor_1d(memories_[kOffsets].data, EPX_INT32, num_local_experts + 1);
  const epx_tensor tokens = rows(kTokens, num_tokens_), recv_tokens = rows(kRecvTokens, recv_rows_);
  const epx_tensor topk_weights = floats(kTopkWeights, num_tokens_, layer_.top_k);
  const epx_tensor recv_weights = floats(kRecvWeights, recv_rows_, 0);
  auto call = make_args<epx_prepare_dispatch_args>();
  call.topk_idx = &topk_idx;
  call.counts = &counts;
  call.offsets = &offsets;
  call.tokens = &tokens;
  call.topk_weights = &topk_weights;
  call.recv_tokens = &recv_tokens;
  call.recv_weights = &recv_weights;
  check_ok(epx_prepare_dispatch(group_.handle(), &call), "epx_prepare_dispatch");
}

void ResidentLayer::combine() {
  const epx_tensor expert_out = rows(kExpertOut, recv_rows_), out = rows(kOut, num_tokens_);
  const epx_tensor combine_weights = floats(kCombineWeights, recv_rows_, 0);
  auto combine = make_args<epx_combine_args>();
  combine.expert_out = &expert_out;
  combine.recv_weights = &combine_weights;
  combine.out = &out;
  check_ok(epx_combine(group_.handle(), &combine), "epx_combine");
}

void ResidentLayer::forward() {
  prepare();
  dispatch();
  combine();
}

void ResidentLayer::backward() {
  combine_bwd();
  dispatch_bwd();
}

void ResidentLayer::combine_bwd() {
  const epx_tensor grad_out = rows(kGradOut, num_tokens_), expert_out = rows(kBwdExpertOut, recv_rows_);
  const epx_tensor weights = floats(kBwdWeights, recv_rows_, 0);
  const epx_tensor grad_expert_out = rows(kGradExpertOut, recv_rows_);
  const epx_tensor grad_weights = floats(kGradRecvWeights, recv_rows_, 0);
  auto combine_bwd = make_args<epx_combine_bwd_args>();
  combine_bwd.grad_out = &grad_out;
  combine_bwd.expert_out = &expert_out;
  combine_bwd.recv_weights = &weights;
  combine_bwd.grad_expert_out = &grad_expert_out;
  combine_bwd.grad_recv_weights = &grad_weights;
  check_ok(epx_combine_bwd(group_.handle(), &combine_bwd), "epx_combine_bwd");
}

void ResidentLayer::dispatch_bwd() {
  const epx_tensor grad_recv = rows(kGradRecv, recv_rows_), grad_tokens = rows(kGradTokens, num_tokens_);
  const epx_tensor grad_recv_weights = floats(kGradRecvWeightsIn, recv_rows_, 0);
  const epx_tensor grad_topk_weights = floats(kGradTopkWeights, num_tokens_, layer_.top_k);
  auto dispatch_bwd = make_args<epx_dispatch_bwd_args>();
  dispatch_bwd.grad_recv = &grad_recv;
  dispatch_bwd.grad_recv_weights = &grad_recv_weights;
  dispatch_bwd.grad_tokens = &grad_tokens;
  dispatch_bwd.grad_topk_weights = &grad_topk_weights;
  check_ok(epx_dispatch_bwd(group_.handle(), &dispatch_bwd), "epx_dispatch_bwd");
}

template <typename Args>
Args ResidentLayer::make_rank_major_args() const {
  auto args = make_args<Args>();
  args.layer.alignment = 0;
  args.handle_mem = memories_[kRowHandle].data;
  return args;
}

epx_tensor ResidentLayer::rank_major_rows(size_t memory) const {
  return epx_tensor_3d(memories_[memory].data, layer_.dtype, group_.shape().num_ranks, rows_per_source_, layer_.hidden);
}
epx_tensor ResidentLayer::rank_major_routes(size_t memory, epx_dtype dtype) const {
  return epx_tensor_3d(memories_[memory].data, dtype, group_.shape().num_ranks, rows_per_source_, layer_.top_k);
}

void ResidentLayer::dispatch_rank_major() {
  const epx_tensor tokens = rows(kRowTokens, num_tokens_);
  const epx_tensor topk_idx = epx_tensor_2d(memories_[kTopkIdx].data, EPX_INT64, num_tokens_, layer_.top_k);
  const epx_tensor topk_weights = floats(kRowTopkWeights, num_tokens_, layer_.top_k);
  const epx_tensor recv_tokens = rank_major_rows(kRecvRows);
  const epx_tensor recv_topk_idx = rank_major_routes(kRecvRowIdx, EPX_INT64);
  const epx_tensor recv_weights = rank_major_routes(kRecvRowWeights, EPX_FLOAT32);
  const epx_tensor counts = epx_tensor_1d(memories_[kSourceCounts].data, EPX_INT32, group_.shape().num_ranks);
  auto dispatch = make_rank_major_args<epx_dispatch_rank_major_args>();
  dispatch.tokens = &tokens;
  dispatch.topk_idx = &topk_idx;
  dispatch.topk_weights = &topk_weights;
  dispatch.recv_tokens = &recv_tokens;
  dispatch.recv_topk_idx = &recv_topk_idx;
  dispatch.recv_weights = &recv_weights;
  dispatch.counts = &counts;
  check_ok(epx_dispatch_rank_major(group_.handle(), &dispatch), "epx_dispatch_rank_major");
}

void ResidentLayer::combine_rank_major() {
  const epx_tensor expert_out = rank_major_rows(kRowExpertOut), out = rows(kRowOut, num_tokens_);
  auto combine = make_rank_major_args<epx_combine_rank_major_args>();
  combine.expert_out = &expert_out;
  combine.out = &out;
  check_ok(epx_combine_rank_major(group_.handle(), &combine), "epx_combine_rank_major");
}

void ResidentLayer::combine_rank_major_bwd() {
  const epx_tensor grad_out = rows(kRowGradOut, num_tokens_), grad_expert_out = rank_major_rows(kGradRows);
  auto combine_bwd = make_rank_major_args<epx_combine_rank_major_bwd_args>();
  combine_bwd.grad_out = &grad_out;
  combine_bwd.grad_expert_out = &grad_expert_out;
  check_ok(epx_combine_rank_major_bwd(group_.handle(), &combine_bwd), "epx_combine_rank_major_bwd");
}

void ResidentLayer::dispatch_rank_major_bwd() {
  const epx_tensor grad_recv = rank_major_rows(kGradRowsIn), grad_tokens = rows(kRowGradTokens, num_tokens_);
  const epx_tensor grad_recv_weights = rank_major_routes(kGradRowWeightsIn, EPX_FLOAT32);
  const epx_tensor grad_topk_weights = floats(kRowGradTopkWeights, num_tokens_, layer_.top_k);
  auto dispatch_bwd = make_rank_major_args<epx_dispatch_rank_major_bwd_args>();
  dispatch_bwd.grad_recv = &grad_recv;
  dispatch_bwd.grad_recv_weights = &grad_recv_weights;
  dispatch_bwd.grad_tokens = &grad_tokens;
  dispatch_bwd.grad_topk_weights = &grad_topk_weights;
  check_ok(epx_dispatch_rank_major_bwd(group_.handle(), &dispatch_bwd), "epx_dispatch_rank_major_bwd");
}

void ResidentLayer::rank_major() {
  if (layer_.rank_major == RankMajorRows::absent) return;
  dispatch_rank_major();
  if (sums_rank_major()) combine_rank_major();
  combine_rank_major_bwd();
  if (sums_rank_major()) dispatch_rank_major_bwd();
}

std::vector<std::byte> ResidentLayer::read(size_t memory) const {
  std::vector<std::byte> bytes(memories_[memory].bytes);
  device_.read(bytes.data(), memories_[memory].data, bytes.size());
  return bytes;
}

class ResidentLayer::Snapshot {
public:
  explicit Snapshot(const ResidentLayer& layer) : device_(layer.device_) {
    for (const Memory& memory : layer.memories_) {
      copies_.push_back(device_.allocate(std::max<size_t>(memory.bytes, 1)));
      copy(copies_.back(), memory.data, memory.bytes, device_);
    }
    device_.finish();
  }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;
  ~Snapshot() {
    for (std::byte* memory : copies_)
      device_.free(memory);
  }

  const std::byte* operator[](size_t memory) const { return copies_[memory]; }

  static void copy(std::byte* to, const std::byte* from, size_t bytes, Device& device) {
    const auto stream = static_cast<cudaStream_t>(device.stream());
    const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    check(error == cudaSuccess, "cudaMemcpyAsync: {}", cudaGetErrorString(error));
  }

private:
  Device& device_;
  std::vector<std::byte*> copies_;
};

void ResidentLayer::SnapshotDeleter::operator()(Snapshot* snapshot) const {
  delete snapshot;
}

ResidentLayer::SnapshotOwner ResidentLayer::snapshot() const {
  return SnapshotOwner(new Snapshot(*this));
}

void ResidentLayer::restore_inputs(const Snapshot& from) {
  const auto stream = static_cast<cudaStream_t>(device_.stream());
  for (size_t i = 0; i < memories_.size(); ++i) {
    const Memory& memory = memories_[i];
    if (memory.is_input) {
      Snapshot::copy(memory.data, from[i], memory.bytes, device_);
      continue;
    }
    const cudaError_t error = cudaMemsetAsync(memory.data, static_cast<int>(kScribble), memory.bytes, stream);
    check(error == cudaSuccess, "cudaMemsetAsync: {}", cudaGetErrorString(error));
  }
}

void ResidentLayer::count_wrong(const Snapshot& expected, unsigned long long* count) const {
  const auto stream = static_cast<cudaStream_t>(device_.stream());
  for (size_t i = 0; i < memories_.size(); ++i) {
    const Memory& memory = memories_[i];
    if (memory.is_input || i == kHandle || i == kRowHandle) continue;
    const cudaError_t error = count_differences(memory.data, expected[i], memory.bytes, count, stream);
    check(error == cudaSuccess, "count_differences: {}", cudaGetErrorString(error));
  }
}

void ResidentLayer::check_forward(const Workload& work) const {
  const auto rank = static_cast<size_t>(rank_);
  check_integers("counts", work.plan.ranks[rank].counts, read(kCounts), EPX_INT32);
  check_integers("offsets", work.plan.ranks[rank].offsets, read(kOffsets), EPX_INT32);
  check_rows("recv_tokens", work.dispatch.recv_tokens[rank], read(kRecvTokens), NanRule::bits);
  check_floats("recv_weights", work.dispatch.recv_weights[rank], read(kRecvWeights), NanRule::bits);
  check_rows("out", work.combine.out[rank], read(kOut), NanRule::any_nan);
}

void ResidentLayer::check_rank_major(const Workload& work) const {
  if (layer_.rank_major == RankMajorRows::absent) return;
  const auto rank = static_cast<size_t>(rank_);
  const RankMajorData& data = work.rank_major.value();
  std::vector<int64_t> experts = data.dispatch.recv_topk_idx[rank];
  std::ranges::replace(experts, kScribbledInteger, static_cast<int64_t>(0xa5a5a5a5a5a5a5a5));
  check_integers("counts", data.dispatch.counts[rank], read(kSourceCounts), EPX_INT32);
  check_rows("recv_tokens", data.dispatch.recv_tokens[rank], read(kRecvRows), NanRule::bits);
  check_integers("recv_topk_idx", experts, read(kRecvRowIdx), EPX_INT64);
  check_floats("recv_weights", data.dispatch.recv_weights[rank], read(kRecvRowWeights), NanRule::bits);
  check_rows("grad_expert_out", data.combine_bwd.grad_expert_out[rank], read(kGradRows), NanRule::bits);
  if (!sums_rank_major()) return;
  check_rows("out", data.combine.out[rank], read(kRowOut), NanRule::any_nan);
  check_rows("grad_tokens", data.dispatch_bwd.grad_tokens[rank], read(kRowGradTokens), NanRule::any_nan);
  check_floats("grad_topk_weights", data.dispatch_bwd.grad_topk_weights[rank], read(kRowGradTopkWeights), NanRule::bits);
}

void ResidentLayer::check_backward(const Workload& work) const {
  const auto rank = static_cast<size_t>(rank_);
  check_rows("grad_expert_out", work.combine_bwd.grad_expert_out[rank], read(kGradExpertOut), NanRule::any_nan);
  check_floats("grad_recv_weights", work.combine_bwd.grad_recv_weights[rank], read(kGradRecvWeights), NanRule::any_nan);
  check_rows("grad_tokens", work.dispatch_bwd.grad_tokens[rank], read(kGradTokens), NanRule::any_nan);
  check_floats("grad_topk_weights", work.dispatch_bwd.grad_topk_weights[rank], read(kGradTopkWeights), NanRule::bits);
}

} // namespace epx::test
