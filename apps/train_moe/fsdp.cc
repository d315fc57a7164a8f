// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/fsdp.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <span>
#include <vector>

#include "apps/train_moe/errors.h"
#include "epx/epx_mpi.hpp"

namespace train {
namespace {

// SMs of what an axis moves: the others compute meanwhile.
constexpr int kSms = 16;

} // namespace

int64_t bytes_of(epx_dtype dtype, int64_t elements) {
  switch (dtype) {
  case EPX_FLOAT32:
    return elements * 4;
  case EPX_BFLOAT16:
    return elements * 2;
  case EPX_FLOAT8_E4M3:
    return elements;
  default:
    fail(kExitFailure, "dtype {} is none of weights", static_cast<int>(dtype));
  }
}

// Slices, one to each rank of the axis.
struct FsdpAxis::Slices {
  SplitMatrix::Integers input_offsets, send_sizes, output_offsets, recv_sizes;
};

SplitMatrix::SplitMatrix(Device& device, const Axis& axis_of_ranks, int64_t num_rows, int64_t row_width, int64_t row_unit)
    : rows(num_rows), width(row_width), unit(row_unit), axis(axis_of_ranks), mine(part(axis.rank)),
      most_rows(part(0).count), all_(device) {
  std::vector<int32_t> all(static_cast<size_t>(kNumIntegers * axis.size));
  for (int rank = 0; rank < axis.size; ++rank) {
    const Ownership theirs = part(rank);
    const auto set = [&](Integers which, int64_t value) { all[which * axis.size + rank] = as_count(value); };
    set(firsts, theirs.first);
    set(counts, theirs.count);
    set(landings, axis.rank * theirs.count);
    set(my_first, mine.first);
    set(my_count, mine.count);
  }
  all_.assign(all);
}

FsdpAxis::FsdpAxis(const World& world, Device& device, const Options& options, const Axis& axis, int first)
    : device_(device), axis_(axis), rounds_grads_(options.fsdp_grads == Dtype::bf16), grads_(device), widened_(device),
      rounded_(device) {
  epx::GroupConfig config; // of a group that has no tokens
  config.num_experts = 1;
  config.max_tokens_per_rank = 1;
  config.hidden_dim = options.model.hidden;
  config.max_top_k = 1;
  config.max_alignment = 1;
  config.max_token_dtype = EPX_FLOAT32;
  config.transport = device.is_host() ? EPX_TRANSPORT_HOST : EPX_TRANSPORT_NCCL;
  if (!device.is_host()) config.num_comm_sms = kSms;
  config.color = first;
  config.key = axis.rank;
  config.timeout_ms = options.timeout_ms;
  group_ = {epx::bootstrap_mpi(world.comm(), std::chrono::milliseconds(options.timeout_ms)), config};
  world.together([&] {
    copy_engines_ = device.make_copy_engine_gather(axis.rank, axis.size, [&](std::span<std::byte> bytes) {
      const std::vector<std::byte> of_ranks = world.gather(std::span<const std::byte>(bytes));
      std::copy_n(of_ranks.begin() + first * std::ssize(bytes), bytes.size(), bytes.begin());
    });
  });
}

FsdpAxis::~FsdpAxis() {
  if (std::uncaught_exceptions() > 0) epx::GroupView(group_).abort(); // so that the other ranks do not wait for this one
}

void* FsdpAxis::allocate(int64_t bytes) {
  return group_.mem_alloc(static_cast<size_t>(bytes)).data();
}

void FsdpAxis::reserve_sums(const SplitMatrix& matrix) {
  const int64_t size = axis_.size * matrix.most_rows * matrix.width;
  if (size <= landing_size_) return;
  landing_ = allocate(size * static_cast<int64_t>(rounds_grads_ ? sizeof(Bfloat16) : sizeof(float)));
  landing_size_ = size;
}

bool FsdpAxis::has_copy_engines_for(const SplitMatrix& matrix) const {
  return copy_engines_ != nullptr && matrix.most_rows * axis_.size == matrix.rows;
}

FsdpAxis::Memory FsdpAxis::allocate(const SplitMatrix& matrix, epx_dtype dtype) {
  const int64_t bytes = bytes_of(dtype, matrix.size());
  if (has_copy_engines_for(matrix)) {
    std::byte* const whole = copy_engines_->allocate(static_cast<size_t>(bytes));
    return {whole + bytes / axis_.size * axis_.rank, whole};
  }
  Array<uint8_t>& part = parts_.emplace_back(device_);
  part.resize(bytes_of(dtype, matrix.kept_size()));
  return {part.data(), allocate(bytes)};
}

float* FsdpAxis::room_for_grads(int64_t size) {
  grads_.resize(size);
  return grads_.data();
}

void FsdpAxis::move(const SplitMatrix& matrix, const Slices& slices, epx_stream stream, const epx::ConstTensor& operand,
                    const epx::Tensor& output) {
  group_.ragged_all_to_all({.stream = stream,
                            .operand = operand,
                            .output = output,
                            .input_offsets = matrix.integers(slices.input_offsets),
                            .send_sizes = matrix.integers(slices.send_sizes),
                            .output_offsets = matrix.integers(slices.output_offsets),
                            .recv_sizes = matrix.integers(slices.recv_sizes)});
}

void FsdpAxis::all_gather(const SplitMatrix& matrix, epx_dtype dtype, const Memory& memory) {
  traffic_.gathered += bytes_of(dtype, matrix.size() - matrix.kept_size());
  if (has_copy_engines_for(matrix)) {
    copy_engines_->gather(static_cast<std::byte*>(memory.whole), static_cast<size_t>(bytes_of(dtype, matrix.kept_size())),
                          device_.side_stream());
    return;
  }
  const int64_t kept = matrix.mine.count;
  move(matrix, {SplitMatrix::zeros, SplitMatrix::my_count, SplitMatrix::my_first, SplitMatrix::counts},
       device_.side_stream(), {memory.part, dtype, {kept, matrix.width}},
       {memory.whole, dtype, {matrix.rows, matrix.width}});
}

void FsdpAxis::reduce_scatter(const SplitMatrix& matrix, const float* whole, float* part) {
  const int64_t size = matrix.kept_size();
  const epx_dtype dtype = rounds_grads_ ? EPX_BFLOAT16 : EPX_FLOAT32;
  const void* sent = whole;
  if (rounds_grads_) {
    rounded_.resize(matrix.size());
    device_.round(whole, matrix.size(), rounded_.data());
    sent = rounded_.data();
  }
  move(matrix, {SplitMatrix::firsts, SplitMatrix::counts, SplitMatrix::landings, SplitMatrix::my_count}, device_.stream(),
       {sent, dtype, {matrix.rows, matrix.width}}, {landing_, dtype, {axis_.size * matrix.mine.count, matrix.width}});
  traffic_.reduced += bytes_of(dtype, (axis_.size - 1) * size);
  const auto* parts = static_cast<const float*>(landing_);
  if (rounds_grads_) {
    widened_.resize(axis_.size * size);
    device_.widen(static_cast<const Bfloat16*>(landing_), widened_.size(), widened_.data());
    parts = widened_.data();
  }
  for (int rank = 1; rank < axis_.size; ++rank)
    device_.add(rank > 1 ? part : parts, parts + rank * size, size, part);
}

} // namespace train
