// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/fsdp.h"

#include <chrono>
#include <exception>
#include <vector>

#include "epx/epx_mpi.hpp"

namespace train {
namespace {

// Slices, one to each rank of the axis.
struct Slices {
  SplitMatrix::Integers input_offsets, send_sizes, output_offsets, recv_sizes;
};

void move(const FsdpAxis& axis, const SplitMatrix& matrix, const Slices& slices, const float* operand, int64_t operand_rows,
          float* output, int64_t output_rows) {
  axis.group().ragged_all_to_all({.stream = axis.device().stream(),
                                  .operand = {operand, EPX_FLOAT32, {operand_rows, matrix.width}},
                                  .output = {output, EPX_FLOAT32, {output_rows, matrix.width}},
                                  .input_offsets = matrix.integers(slices.input_offsets),
                                  .send_sizes = matrix.integers(slices.send_sizes),
                                  .output_offsets = matrix.integers(slices.output_offsets),
                                  .recv_sizes = matrix.integers(slices.recv_sizes)});
}

int64_t bytes_of(int64_t elements) {
  return elements * static_cast<int64_t>(sizeof(float));
}

} // namespace

SplitMatrix::SplitMatrix(Device& device, const Axis& axis_of_ranks, int64_t num_rows, int64_t row_width)
    : rows(num_rows), width(row_width), axis(axis_of_ranks), mine(ownership(rows, axis)),
      most_rows(ownership(rows, {0, axis.size}).count), all_(device) {
  std::vector<int32_t> all(static_cast<size_t>(kNumIntegers * axis.size));
  for (int rank = 0; rank < axis.size; ++rank) {
    const Ownership part = ownership(rows, {rank, axis.size});
    const auto set = [&](Integers which, int64_t value) { all[which * axis.size + rank] = as_count(value); };
    set(firsts, part.first);
    set(counts, part.count);
    set(landings, axis.rank * part.count);
    set(my_first, mine.first);
    set(my_count, mine.count);
  }
  all_.assign(all);
}

FsdpAxis::FsdpAxis(const World& world, Device& device, const Options& options, const Mesh& mesh)
    : device_(device), axis_(mesh.fsdp), grads_(device) {
  epx::GroupConfig config; // of a group that has no tokens
  config.num_experts = 1;
  config.max_tokens_per_rank = 1;
  config.hidden_dim = options.model.hidden;
  config.max_top_k = 1;
  config.max_alignment = 1;
  config.max_token_dtype = EPX_FLOAT32;
  config.transport = device.is_host() ? EPX_TRANSPORT_HOST : EPX_TRANSPORT_NCCL;
  config.color = mesh.ep.rank;
  config.key = mesh.fsdp.rank;
  config.timeout_ms = options.timeout_ms;
  group_ = {epx::bootstrap_mpi(world.comm(), std::chrono::milliseconds(options.timeout_ms)), config};
}

FsdpAxis::~FsdpAxis() {
  if (std::uncaught_exceptions() > 0) epx::GroupView(group_).abort(); // so that the other ranks do not wait for this one
}

float* FsdpAxis::allocate(int64_t size) {
  return group_.mem_alloc(static_cast<size_t>(bytes_of(size))).as<float>().data();
}

float* FsdpAxis::allocate(const SplitMatrix& matrix) {
  return allocate(matrix.size());
}

void FsdpAxis::reserve_sums(const SplitMatrix& matrix) {
  const int64_t size = axis_.size * matrix.most_rows * matrix.width;
  if (size <= landing_size_) return;
  landing_ = allocate(size);
  landing_size_ = size;
}

float* FsdpAxis::room_for_grads(int64_t size) {
  grads_.resize(size);
  return grads_.data();
}

void FsdpAxis::all_gather(const SplitMatrix& matrix, const float* part, float* whole) {
  move(*this, matrix, {SplitMatrix::zeros, SplitMatrix::my_count, SplitMatrix::my_first, SplitMatrix::counts}, part,
       matrix.mine.count, whole, matrix.rows);
  traffic_.gathered += bytes_of((matrix.rows - matrix.mine.count) * matrix.width);
}

void FsdpAxis::reduce_scatter(const SplitMatrix& matrix, const float* whole, float* part) {
  const int64_t size = matrix.mine.count * matrix.width;
  move(*this, matrix, {SplitMatrix::firsts, SplitMatrix::counts, SplitMatrix::landings, SplitMatrix::my_count}, whole,
       matrix.rows, landing_, axis_.size * matrix.mine.count);
  traffic_.reduced += bytes_of((axis_.size - 1) * size);
  for (int rank = 1; rank < axis_.size; ++rank)
    device_.add(rank > 1 ? part : landing_, landing_ + rank * size, size, part);
}

WholeExperts::WholeExperts(FsdpAxis* axis, Device& device, Parameters& parameters, const ModelOptions& model,
                           Parameters::Id gate_up, Parameters::Id down, int64_t count)
    : axis_(count > 0 ? axis : nullptr), parameters_(parameters),
      count_(count), gate_up_{gate_up, SplitMatrix(device, axis != nullptr ? axis->axis() : Axis(), count * 2 * model.ffn,
                                                   model.hidden)},
      down_{down, SplitMatrix(device, axis != nullptr ? axis->axis() : Axis(), count * model.hidden, model.ffn)} {
  if (axis_ == nullptr) return;
  for (Matrix* const matrix : {&gate_up_, &down_}) {
    matrix->whole = axis_->allocate(matrix->split);
    axis_->reserve_sums(matrix->split);
  }
}

const float* WholeExperts::values(const Matrix& matrix) const {
  return axis_ != nullptr ? matrix.whole : parameters_.values(matrix.id);
}

void WholeExperts::gather() {
  if (axis_ == nullptr) return;
  for (const Matrix* const matrix : {&gate_up_, &down_})
    axis_->all_gather(matrix->split, parameters_.values(matrix->id), matrix->whole);
}

WholeExperts::Grads WholeExperts::room_for_grads() {
  if (axis_ == nullptr) return {parameters_.sharded_grads(gate_up_.id), parameters_.sharded_grads(down_.id)};
  float* const room = axis_->room_for_grads(gate_up_.split.size() + down_.split.size());
  return {room, room + gate_up_.split.size()};
}

void WholeExperts::reduce(const Grads& grads) {
  if (axis_ == nullptr) return;
  axis_->reduce_scatter(gate_up_.split, grads.gate_up, parameters_.sharded_grads(gate_up_.id));
  axis_->reduce_scatter(down_.split, grads.down, parameters_.sharded_grads(down_.id));
}

} // namespace train
