// SPDX-License-Identifier: Apache-2.0
// Parameters has all parameters of a model, their gradients and AdamW's moments, in two flat areas: *replicated* ones are the
// same on every rank, and *sharded* ones are experts that live on one rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace train {

struct Tensor {
  std::string name;
  std::vector<int64_t> shape; // shape of the whole tensor; a sharded one is split along the first dimension
  bool is_sharded = false;
  bool decays = true;
  double init_limit = 0;    // uniform in [-limit, limit)
  int64_t first = 0;        // first index of the first dimension here
  int64_t count = 0;        // indices of the first dimension here
  int64_t offset = 0;       // elements, in its area
  int64_t row_size() const; // elements per index of the first dimension
  int64_t size() const { return count * row_size(); }
};

struct Area {
  std::vector<float> values, grads, first_moments, second_moments;
};

class Parameters {
public:
  using Id = int;

  Id add_replicated(const std::string& name, std::vector<int64_t> shape, double init_limit, bool decays = true);
  // Adds a tensor of which [first, first + count) of shape[0] live here.
  Id add_sharded(const std::string& name, std::vector<int64_t> shape, double init_limit, int64_t first, int64_t count);

  // Sets random values that depend on the seed and on how many tensors were added before, not on how they are sharded.
  void initialise(uint64_t seed);

  // Makes one step of AdamW (arXiv:1711.05101) on both areas; step counts from 1.
  void step(int64_t step, double learning_rate, double weight_decay);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Tensor& tensor(Id id) const { return tensors_[id]; }
  Area& area(const Tensor& tensor) { return tensor.is_sharded ? sharded_ : replicated_; }
  Area& replicated() { return replicated_; }
  float* values(Id id) { return area(tensors_[id]).values.data() + tensors_[id].offset; }
  float* sharded_grads(Id id) { return sharded_.grads.data() + tensors_[id].offset; }
  // Returns the tensor's part of a gradient of the replicated area, of one chunk for instance.
  float* in(std::vector<float>& replicated_grads, Id id) const { return replicated_grads.data() + tensors_[id].offset; }

private:
  Id add(Tensor tensor);

  std::vector<Tensor> tensors_;
  Area replicated_, sharded_;
};

} // namespace train
