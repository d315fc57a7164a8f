// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/parameters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

namespace train {
namespace {

constexpr int64_t kRow = 64; // elements that are not split

} // namespace

int64_t Tensor::whole_size() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Parameters::Id Parameters::add_shared(const std::string& name, std::vector<int64_t> shape, double init_limit, bool decays) {
  Tensor tensor{name, std::move(shape), false, decays, init_limit};
  tensor.size = tensor.whole_size();
  return add(std::move(tensor));
}

Parameters::Id Parameters::add_sharded(const std::string& name, std::vector<int64_t> shape, double init_limit,
                                       int64_t first, int64_t size) {
  Tensor tensor{name, std::move(shape), true, true, init_limit, first, size};
  return add(std::move(tensor));
}

Parameters::Id Parameters::add(Tensor tensor) {
  Area& home = area(tensor);
  tensor.offset = tensor.whole_offset = home.size;
  home.size += tensor.size;
  tensors_.push_back(std::move(tensor));
  return static_cast<Id>(tensors_.size()) - 1;
}

void Parameters::allocate(Area& area) {
  for (Array<float>* values : {&area.values, &area.grads, &area.first_moments, &area.second_moments}) {
    values->resize(area.size);
    values->clear();
  }
}

void Parameters::split(FsdpAxis* axis) {
  shared_size_ = (shared_.size + kRow - 1) / kRow * kRow;
  shared_.size = shared_size_;
  axis_ = axis;
  if (axis == nullptr) return;
  rows_.emplace(device_, axis->axis(), shared_size_ / kRow, kRow);
  memory_ = axis->allocate(*rows_, EPX_FLOAT32);
  const int64_t begin = rows_->mine.first * kRow;
  shared_.size = rows_->kept_size();
  for (Tensor& tensor : tensors_) {
    if (tensor.is_sharded) continue;
    const int64_t from = std::clamp(begin - tensor.whole_offset, int64_t{0}, tensor.size);
    const int64_t to = std::clamp(begin + shared_.size - tensor.whole_offset, int64_t{0}, tensor.size);
    tensor.first = from;
    tensor.size = to - from;
    tensor.offset = tensor.size > 0 ? tensor.whole_offset + from - begin : 0;
  }
}

std::vector<int64_t> Parameters::shared_parts() const {
  std::vector<int64_t> parts;
  for (int rank = 0; rows_ && rank < rows_->axis.size; ++rank)
    parts.push_back(rows_->part(rank).count * kRow);
  return parts;
}

float* Parameters::values(Id id) {
  const Tensor& tensor = tensors_[id];
  if (tensor.is_sharded || axis_ == nullptr) return area(tensor).values.data() + tensor.offset;
  return static_cast<float*>(memory_.whole) + tensor.whole_offset;
}

void Parameters::gather() {
  if (axis_ == nullptr) return;
  device_.copy(memory_.part, shared_.values.data(), static_cast<size_t>(bytes_of(EPX_FLOAT32, rows_->kept_size())));
  device_.fork(); // all_gather() is on the side stream
  axis_->all_gather(*rows_, EPX_FLOAT32, memory_);
  device_.join();
}

void Parameters::initialise(uint64_t seed, FsdpAxis* axis) {
  split(axis);
  allocate(shared_);
  allocate(sharded_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& tensor = tensors_[i];
    std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(i)};
    std::mt19937_64 random(words);
    random.discard(static_cast<unsigned long long>(tensor.first));
    std::vector<float> values(tensor.size);
    for (float& value : values) {
      const double unit = static_cast<double>(random() >> 11) * 0x1p-53; // [0, 1)
      value = static_cast<float>((2 * unit - 1) * tensor.init_limit);
    }
    area(tensor).values.copy_in(tensor.offset, values);
  }
}

void Parameters::step(int64_t step, double learning_rate, double weight_decay) {
  const double correction1 = 1 - std::pow(kAdamBeta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(kAdamBeta2, static_cast<double>(step));
  for (const Tensor& tensor : tensors_) {
    Area& home = area(tensor);
    const auto decay = static_cast<float>(tensor.decays ? learning_rate * weight_decay : 0);
    device_.adamw({learning_rate, correction1, correction2, decay}, tensor.size,
                  {home.values.data() + tensor.offset, home.grads.data() + tensor.offset,
                   home.first_moments.data() + tensor.offset, home.second_moments.data() + tensor.offset});
  }
}

} // namespace train
