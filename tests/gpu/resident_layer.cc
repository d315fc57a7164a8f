// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/resident_layer.h"

#include <algorithm>
#include <cstdint>
#include <span>

#include "base/dtypes.h"
#include "tests/gpu/compare_kernel.h"
#include "tests/support/check.h"
#include "tests/support/compare.h"
#include "tests/support/format_data.h"
#include "tests/support/values.h"

namespace epx::test {

ResidentLayer::ResidentLayer(GroupRun& group, const LayerCase& layer, bool in_place)
    : group_(group), device_(group.device()), rank_(group.rank()), layer_(layer),
      row_format_(wire_format(layer.format).get()), sum_format_(wire_format(layer.sum_format).get()) {
  lay_out();
  for (Memory& memory : memories_) {
    if (!in_place || !memory.is_written_by_peers || memory.bytes == 0) continue;
    *memory.tensor = group_.view().mem_alloc(memory.bytes).release();
    memory.owner = Memory::group;
  }
  allocate_on_device();
}

ResidentLayer::ResidentLayer(GroupRun& group, const LayerCase& layer, std::byte* registered, size_t bytes)
    : group_(group), device_(group.device()), rank_(group.rank()), layer_(layer),
      row_format_(wire_format(layer.format).get()), sum_format_(wire_format(layer.sum_format).get()) {
  lay_out();
  for (Memory& memory : memories_) {
    if (!memory.is_written_by_peers) continue;
    check(memory.bytes <= bytes, "{} bytes do not fit in {}", memory.bytes, bytes);
    *memory.tensor = registered;
    memory.owner = Memory::borrowed;
    const size_t used = (memory.bytes + 255) / 256 * 256;
    registered += used;
    bytes -= std::min(used, bytes);
  }
  allocate_on_device();
}

void ResidentLayer::allocate_on_device() {
  for (const Memory& memory : memories_)
    if (memory.data() == nullptr) *memory.tensor = device_.allocate(std::max<size_t>(memory.bytes, 1));
  rank_major_memory_.topk_idx = layer_memory_.topk_idx;
  layer_memory_.handle_mem = {handle_, memory_of(handle_).bytes};
  rank_major_memory_.handle_mem = {rank_major_handle_, memory_of(rank_major_handle_).bytes};
}

void ResidentLayer::lay_out() {
  const GroupCase& shape = group_.shape();
  const int64_t num_tokens = shape.max_tokens, recv_rows = recv_capacity(shape);
  const bool is_rank_major = layer_.rank_major == RankMajorRows::max_tokens;
  LayerMemory &major = layer_memory_, &rank_major = rank_major_memory_;
  major.layer = {layer_.top_k, layer_.alignment};
  major.stream = device_.stream();
  major.dtype = layer_.dtype;
  major.index_dtype = EPX_INT64;
  major.num_tokens = num_tokens;
  major.hidden = layer_.hidden;
  major.num_rows = recv_rows;
  major.num_local_experts = group_.info().num_local_experts;
  if (layer_.format.is_quantised()) major.format = &row_format_;
  if (layer_.sum_format.is_quantised()) major.sum_format = &sum_format_;
  rank_major = major;
  rank_major.layer.alignment = 0;
  rank_major.num_ranks = shape.num_ranks;
  rank_major.rows_per_source =
      is_rank_major ? std::min(num_tokens, recv_rows / (int64_t{shape.num_ranks} * layer_.top_k)) : 0;
  rank_major.row_spacing = layer_.rank_major_compact ? EPX_ROWS_COMPACT : EPX_ROWS_STRIDED;
  const size_t handle_bytes = group_.view().handle_mem_size(major.layer);
  const auto row = static_cast<size_t>(row_bytes(layer_.dtype, layer_.hidden));
  const auto tokens = static_cast<size_t>(num_tokens), slots = static_cast<size_t>(recv_rows);
  const size_t routes = tokens * static_cast<size_t>(layer_.top_k);
  const auto experts = static_cast<size_t>(major.num_local_experts);
  const auto add = [&](std::byte*& tensor, size_t bytes, bool is_input) {
    memories_.push_back({.tensor = &tensor, .bytes = bytes, .is_input = is_input});
  };
  const auto add_of_peers = [&](std::byte*& tensor, size_t bytes) {
    memories_.push_back({.tensor = &tensor, .bytes = bytes, .is_written_by_peers = true});
  };
  add(major.topk_idx, routes * sizeof(int64_t), true);
  add(major.tokens, tokens * row, true);
  add(major.topk_weights, routes * sizeof(float), true);
  add(major.expert_out, slots * row, true);
  add(major.expert_weights, slots * sizeof(float), true);
  add(major.grad_out, tokens * row, true);
  add(major.bwd_expert_out, slots * row, true);
  add(major.bwd_weights, slots * sizeof(float), true);
  add(major.grad_recv, slots * row, true);
  add(major.grad_weights, slots * sizeof(float), true);
  add(handle_, handle_bytes, false);
  add(major.counts, experts * sizeof(int32_t), false);
  add(major.offsets, (experts + 1) * sizeof(int32_t), false);
  add_of_peers(major.recv_tokens, slots * row);
  add(major.recv_weights, slots * sizeof(float), false);
  add(major.out, tokens * row, false);
  add_of_peers(major.grad_expert_out, slots * row);
  add(major.grad_recv_weights, slots * sizeof(float), false);
  add(major.grad_tokens, tokens * row, false);
  add(major.grad_topk_weights, routes * sizeof(float), false);
  const auto source_rows = static_cast<size_t>(shape.num_ranks * rank_major.rows_per_source);
  const size_t row_routes = source_rows * static_cast<size_t>(layer_.top_k);
  const auto of_sums = [&](size_t bytes) { return is_rank_major && sums_rank_major() ? bytes : 0; };
  add(rank_major.tokens, is_rank_major ? tokens * row : 0, true);
  add(rank_major.topk_weights, is_rank_major ? routes * sizeof(float) : 0, true);
  add(rank_major.grad_out, is_rank_major ? tokens * row : 0, true);
  add(rank_major.expert_out, of_sums(source_rows * row), true);
  add(rank_major.grad_recv, of_sums(source_rows * row), true);
  add(rank_major.grad_weights, of_sums(row_routes * sizeof(float)), true);
  add(rank_major_handle_, handle_bytes, false);
  add_of_peers(rank_major.recv_tokens, source_rows * row);
  add(rank_major.recv_topk_idx, row_routes * sizeof(int64_t), false);
  add(rank_major.recv_weights, row_routes * sizeof(float), false);
  add(rank_major.counts, static_cast<size_t>(shape.num_ranks) * sizeof(int32_t), false);
  add(rank_major.out, of_sums(tokens * row), false);
  add_of_peers(rank_major.grad_expert_out, source_rows * row);
  add(rank_major.grad_tokens, of_sums(tokens * row), false);
  add(rank_major.grad_topk_weights, of_sums(routes * sizeof(float)), false);
}

ResidentLayer::~ResidentLayer() {
  for (const Memory& memory : memories_) {
    if (memory.owner == Memory::group) epx_mem_free(group_.handle(), memory.data());
    if (memory.owner == Memory::device) device_.free(memory.data());
  }
}

void ResidentLayer::write(const Workload& work) {
  const auto rank = static_cast<size_t>(rank_);
  const auto write_input = [&](std::byte* tensor, const auto& values) {
    const auto bytes = std::as_bytes(std::span(values));
    check_equal(bytes.size(), memory_of(tensor).bytes, "bytes of an input");
    device_.write(tensor, bytes.data(), bytes.size());
  };
  write_input(layer_memory_.topk_idx, work.routing[rank].topk_idx);
  write_input(layer_memory_.tokens, work.dispatch.tokens[rank].bytes);
  write_input(layer_memory_.topk_weights, work.dispatch.topk_weights[rank]);
  write_input(layer_memory_.expert_out, work.combine.expert_out[rank].bytes);
  write_input(layer_memory_.expert_weights, work.combine.recv_weights[rank]);
  write_input(layer_memory_.grad_out, work.combine_bwd.grad_out[rank].bytes);
  write_input(layer_memory_.bwd_expert_out, work.combine_bwd.expert_out[rank].bytes);
  write_input(layer_memory_.bwd_weights, work.combine_bwd.recv_weights[rank]);
  write_input(layer_memory_.grad_recv, work.dispatch_bwd.grad_recv[rank].bytes);
  write_input(layer_memory_.grad_weights, work.dispatch_bwd.grad_recv_weights[rank]);
  if (work.rank_major) {
    check_equal(work.rank_major->rows_per_source, rank_major_memory_.rows_per_source, "M");
    write_input(rank_major_memory_.tokens, work.rank_major->dispatch.tokens[rank].bytes);
    write_input(rank_major_memory_.topk_weights, work.rank_major->dispatch.topk_weights[rank]);
    write_input(rank_major_memory_.grad_out, work.rank_major->combine_bwd.grad_out[rank].bytes);
  }
  if (work.rank_major && sums_rank_major()) {
    write_input(rank_major_memory_.expert_out, work.rank_major->combine.expert_out[rank].bytes);
    write_input(rank_major_memory_.grad_recv, work.rank_major->dispatch_bwd.grad_recv[rank].bytes);
    write_input(rank_major_memory_.grad_weights, work.rank_major->dispatch_bwd.grad_recv_weights[rank]);
  }
  for (const Memory& memory : memories_) {
    if (memory.is_input) continue;
    const std::vector<std::byte> scribble(memory.bytes, kScribble);
    device_.write(memory.data(), scribble.data(), scribble.size());
  }
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

void ResidentLayer::rank_major() {
  if (layer_.rank_major == RankMajorRows::absent) return;
  dispatch_rank_major();
  if (sums_rank_major()) combine_rank_major();
  combine_rank_major_bwd();
  if (sums_rank_major()) dispatch_rank_major_bwd();
}

const ResidentLayer::Memory& ResidentLayer::memory_of(const std::byte* tensor) const {
  return *std::ranges::find(memories_, tensor, &Memory::data);
}

std::vector<std::byte> ResidentLayer::read(const std::byte* tensor) const {
  std::vector<std::byte> bytes(memory_of(tensor).bytes);
  device_.read(bytes.data(), tensor, bytes.size());
  return bytes;
}

class ResidentLayer::Snapshot {
public:
  explicit Snapshot(const ResidentLayer& layer) : device_(layer.device_) {
    for (const Memory& memory : layer.memories_) {
      copies_.push_back(device_.allocate(std::max<size_t>(memory.bytes, 1)));
      copy(copies_.back(), memory.data(), memory.bytes, device_);
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
      Snapshot::copy(memory.data(), from[i], memory.bytes, device_);
      continue;
    }
    const cudaError_t error = cudaMemsetAsync(memory.data(), static_cast<int>(kScribble), memory.bytes, stream);
    check(error == cudaSuccess, "cudaMemsetAsync: {}", cudaGetErrorString(error));
  }
}

void ResidentLayer::count_wrong(const Snapshot& expected, unsigned long long* count) const {
  const auto stream = static_cast<cudaStream_t>(device_.stream());
  for (size_t i = 0; i < memories_.size(); ++i) {
    const Memory& memory = memories_[i];
    if (memory.is_input || memory.tensor == &handle_ || memory.tensor == &rank_major_handle_) continue;
    const cudaError_t error = count_differences(memory.data(), expected[i], memory.bytes, count, stream);
    check(error == cudaSuccess, "count_differences: {}", cudaGetErrorString(error));
  }
}

void ResidentLayer::check_forward(const Workload& work) const {
  const auto rank = static_cast<size_t>(rank_);
  check_integers("counts", work.plan.ranks[rank].counts, read(layer_memory_.counts), EPX_INT32);
  check_integers("offsets", work.plan.ranks[rank].offsets, read(layer_memory_.offsets), EPX_INT32);
  check_rows("recv_tokens", work.dispatch.recv_tokens[rank], read(layer_memory_.recv_tokens), rule_of_rows());
  check_floats("recv_weights", work.dispatch.recv_weights[rank], read(layer_memory_.recv_weights), NanRule::bits);
  check_rows("out", work.combine.out[rank], read(layer_memory_.out), NanRule::any_nan);
}

void ResidentLayer::check_rank_major(const Workload& work) const {
  if (layer_.rank_major == RankMajorRows::absent) return;
  const auto rank = static_cast<size_t>(rank_);
  const RankMajorData& data = work.rank_major.value();
  std::vector<int64_t> experts = data.dispatch.recv_topk_idx[rank];
  std::ranges::replace(experts, kScribbledInteger, static_cast<int64_t>(0xa5a5a5a5a5a5a5a5));
  check_integers("counts", data.dispatch.counts[rank], read(rank_major_memory_.counts), EPX_INT32);
  check_rows("recv_tokens", data.dispatch.recv_tokens[rank], read(rank_major_memory_.recv_tokens), rule_of_rows());
  check_integers("recv_topk_idx", experts, read(rank_major_memory_.recv_topk_idx), EPX_INT64);
  check_floats("recv_weights", data.dispatch.recv_weights[rank], read(rank_major_memory_.recv_weights), NanRule::bits);
  check_rows("grad_expert_out", data.combine_bwd.grad_expert_out[rank], read(rank_major_memory_.grad_expert_out),
             rule_of_rows());
  if (!sums_rank_major()) return;
  check_rows("out", data.combine.out[rank], read(rank_major_memory_.out), NanRule::any_nan);
  check_rows("grad_tokens", data.dispatch_bwd.grad_tokens[rank], read(rank_major_memory_.grad_tokens), NanRule::any_nan);
  check_floats("grad_topk_weights", data.dispatch_bwd.grad_topk_weights[rank], read(rank_major_memory_.grad_topk_weights),
               NanRule::bits);
}

void ResidentLayer::check_backward(const Workload& work) const {
  const auto rank = static_cast<size_t>(rank_);
  check_rows("grad_expert_out", work.combine_bwd.grad_expert_out[rank], read(layer_memory_.grad_expert_out),
             NanRule::any_nan);
  check_floats("grad_recv_weights", work.combine_bwd.grad_recv_weights[rank], read(layer_memory_.grad_recv_weights),
               NanRule::any_nan);
  check_rows("grad_tokens", work.dispatch_bwd.grad_tokens[rank], read(layer_memory_.grad_tokens), NanRule::any_nan);
  check_floats("grad_topk_weights", work.dispatch_bwd.grad_topk_weights[rank], read(layer_memory_.grad_topk_weights),
               NanRule::bits);
}

} // namespace epx::test
