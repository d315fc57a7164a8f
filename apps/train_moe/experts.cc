// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/experts.h"

#include <utility>

#include "apps/train_moe/pieces.h"

namespace train {
namespace {

epx_dtype dtype_of_elements(const Options& options) {
  if (options.recipe != EPX_MOE_RECIPE_WIDE) return EPX_FLOAT8_E4M3;
  return as_epx(options.dtype);
}

} // namespace

ExpertWeights::ExpertWeights(FsdpAxis* axis, Device& device, Parameters& parameters, const Options& options,
                             const Mesh& mesh, const Experts& ids)
    : device_(device), parameters_(parameters), model_(options.model), dtype_(dtype_of_elements(options)),
      count_(ownership(model_.experts, mesh.ep).count), axis_(count_ > 0 ? axis : nullptr), cuda_(device.stream()),
      gate_up_(weight(ids.gate_up, count_ * 2 * model_.ffn, model_.hidden, mesh.row_unit)),
      down_(weight(ids.down, count_ * model_.hidden, model_.ffn, mesh.row_unit)) {
  if (gate_up_.scales)
    use_fp8();
  else
    params_ = expert_params(model_, count_, gate_up_.elements.memory.whole, down_.elements.memory.whole, dtype_);
}

ExpertWeights::Weight ExpertWeights::weight(Parameters::Id id, int64_t rows, int64_t width, int64_t unit) {
  const Axis axis = axis_ != nullptr ? axis_->axis() : Axis();
  SplitMatrix elements(device_, axis, rows, width, unit);
  float* const values = parameters_.values(id);
  const bool reads_parameters = axis_ == nullptr && dtype_ == EPX_FLOAT32;
  Weight made = {
      id, reads_parameters ? Stored{std::move(elements), dtype_, {values, values}} : stored(dtype_, std::move(elements)),
      std::nullopt};
  if (dtype_ == EPX_FLOAT8_E4M3)
    made.scales.emplace(stored(EPX_FLOAT32, {device_, axis, rows / kFp8Block, width / kFp8Block}));
  if (axis_ != nullptr) axis_->reserve_sums(made.elements.matrix);
  return made;
}

ExpertWeights::Stored ExpertWeights::stored(epx_dtype dtype, SplitMatrix matrix) {
  FsdpAxis::Memory memory{};
  if (axis_ != nullptr)
    memory = axis_->allocate(matrix, dtype);
  else
    memory.part = memory.whole = allocate(dtype, matrix.size());
  return {std::move(matrix), dtype, memory};
}

void* ExpertWeights::allocate(epx_dtype dtype, int64_t size) {
  Array<uint8_t>& buffer = buffers_.emplace_back(device_);
  buffer.resize(bytes_of(dtype, size));
  return buffer.data();
}

void ExpertWeights::use_fp8() {
  const std::vector<void*> wholes = {gate_up_.elements.memory.whole, gate_up_.scales->memory.whole,
                                     down_.elements.memory.whole,
                                     down_.scales->memory.whole}; // behind which the transposes come
  fp8_tensors_ = epx::moe::fp8_tensors(
      model_.hidden, model_.ffn, [&, i = size_t{0}](epx_dtype dtype, int64_t rows, int64_t columns) mutable {
        void* const memory = i < wholes.size() ? wholes[i] : allocate(dtype, count_ * rows * columns);
        ++i;
        return epx::Tensor(memory, dtype, {count_, rows, columns});
      });
  fp8_params_ = *fp8_tensors_;
}

void ExpertWeights::fetch() {
  for (const Weight* const weight : {&gate_up_, &down_})
    convert_kept(*weight);
  if (axis_ == nullptr) return;
  device_.fork();
  for (const Weight* const weight : {&gate_up_, &down_}) {
    gather(weight->elements);
    if (weight->scales) gather(*weight->scales);
  }
}

void ExpertWeights::await() {
  if (axis_ != nullptr) device_.join();
  if (fp8_tensors_) epx::moe::transpose_params({.cuda = cuda(), .fp8_params = *fp8_tensors_});
}

void ExpertWeights::convert_kept(const Weight& weight) {
  const float* const values = parameters_.values(weight.id);
  const SplitMatrix& matrix = weight.elements.matrix;
  const int64_t rows = matrix.mine.count, width = matrix.width;
  if (dtype_ == EPX_FLOAT32 && axis_ != nullptr)
    device_.copy(weight.elements.memory.part, values, static_cast<size_t>(bytes_of(dtype_, rows * width)));
  if (dtype_ == EPX_BFLOAT16) device_.round(values, rows * width, static_cast<Bfloat16*>(weight.elements.memory.part));
  if (dtype_ != EPX_FLOAT8_E4M3 || rows == 0) return;
  epx::moe::quantise_weights(
      {.cuda = cuda(),
       .format = epx::RowFormat(EPX_SCALING_BLOCK128),
       .weights = {values, EPX_FLOAT32, {1, rows, width}},
       .codes = {weight.elements.memory.part, EPX_FLOAT8_E4M3, {1, rows, width}},
       .scales = {weight.scales->memory.part, EPX_FLOAT32, {1, rows / kFp8Block, width / kFp8Block}}});
}

void ExpertWeights::gather(const Stored& stored) {
  axis_->all_gather(stored.matrix, stored.dtype, stored.memory);
}

ExpertWeights::Grads ExpertWeights::room_for_grads() {
  if (axis_ == nullptr) return {parameters_.sharded_grads(gate_up_.id), parameters_.sharded_grads(down_.id)};
  const int64_t gate_up_size = gate_up_.elements.matrix.size();
  float* const room = axis_->room_for_grads(gate_up_size + down_.elements.matrix.size());
  return {room, room + gate_up_size};
}

void ExpertWeights::reduce(const Grads& grads) {
  if (axis_ == nullptr) return;
  axis_->reduce_scatter(gate_up_.elements.matrix, grads.gate_up, parameters_.sharded_grads(gate_up_.id));
  axis_->reduce_scatter(down_.elements.matrix, grads.down, parameters_.sharded_grads(down_.id));
}

} // namespace train
