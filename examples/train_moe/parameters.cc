// SPDX-License-Identifier: Apache-2.0
#include "examples/train_moe/parameters.h"

#include <cmath>
#include <functional>
#include <new>
#include <numeric>
#include <random>

#include "examples/train_moe/errors.h"

namespace train {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.99;
constexpr double kEpsilon = 1e-8;

} // namespace

int64_t Tensor::row_size() const {
  return std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>());
}

Parameters::Id Parameters::add_replicated(const std::string& name, std::vector<int64_t> shape, double init_limit,
                                          bool decays) {
  Tensor tensor{name, std::move(shape), false, decays, init_limit};
  tensor.count = tensor.shape[0];
  return add(std::move(tensor));
}

Parameters::Id Parameters::add_sharded(const std::string& name, std::vector<int64_t> shape, double init_limit,
                                       int64_t first, int64_t count) {
  Tensor tensor{name, std::move(shape), true, true, init_limit, first, count};
  return add(std::move(tensor));
}

Parameters::Id Parameters::add(Tensor tensor) {
  Area& home = area(tensor);
  tensor.offset = static_cast<int64_t>(home.values.size());
  try {
    for (std::vector<float>* values : {&home.values, &home.grads, &home.first_moments, &home.second_moments})
      values->resize(tensor.offset + tensor.size());
  } catch (const std::bad_alloc&) {
    fail(kExitFailure, "out of memory: {} bytes for {} and what was before it, each of values, gradients and moments",
         (tensor.offset + tensor.size()) * sizeof(float), tensor.name);
  }
  tensors_.push_back(std::move(tensor));
  return static_cast<Id>(tensors_.size()) - 1;
}

void Parameters::initialise(uint64_t seed) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& tensor = tensors_[i];
    std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(i)};
    std::mt19937_64 random(words);
    random.discard(static_cast<unsigned long long>(tensor.first * tensor.row_size()));
    float* const values = area(tensor).values.data() + tensor.offset;
    for (int64_t j = 0; j < tensor.size(); ++j) {
      const double unit = static_cast<double>(random() >> 11) * 0x1p-53; // [0, 1)
      values[j] = static_cast<float>((2 * unit - 1) * tensor.init_limit);
    }
  }
}

void Parameters::step(int64_t step, double learning_rate, double weight_decay) {
  const double correction1 = 1 - std::pow(kBeta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(kBeta2, static_cast<double>(step));
  for (const Tensor& tensor : tensors_) {
    Area& home = area(tensor);
    const auto decay = static_cast<float>(tensor.decays ? learning_rate * weight_decay : 0);
    for (int64_t i = tensor.offset; i < tensor.offset + tensor.size(); ++i) {
      const float grad = home.grads[i];
      float& m = home.first_moments[i];
      float& v = home.second_moments[i];
      m += static_cast<float>(1 - kBeta1) * (grad - m);
      v += static_cast<float>(1 - kBeta2) * (grad * grad - v);
      const double update = m / correction1 / (std::sqrt(v / correction2) + kEpsilon);
      home.values[i] -= decay * home.values[i] + static_cast<float>(learning_rate * update);
    }
  }
}

} // namespace train
