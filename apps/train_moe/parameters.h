// SPDX-License-Identifier: Apache-2.0
// Parameters has all parameters of a model, their gradients and AdamW's moments, in two flat areas of a Device: *replicated*
// ones are the same on every rank, and *sharded* ones are a run of the
// elements of a tensor of all experts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "apps/train_moe/array.h"
#include "apps/train_moe/device.h"

namespace train {

struct Tensor {
  std::string name;
  std::vector<int64_t> shape; // shape of the whole tensor
  bool is_sharded = false;
  bool decays = true;
  double init_limit = 0; // uniform in [-limit, limit)
  int64_t first = 0;     // first element here
  int64_t size = 0;      // elements here
  int64_t offset = 0;    // elements, in its area
  int64_t whole_size() const;
};

struct Area {
  explicit Area(Device& device) : values(device), grads(device), first_moments(device), second_moments(device) {}

  int64_t size = 0;
  Array<float> values, grads, first_moments, second_moments;
};

class Parameters {
public:
  using Id = int;

  explicit Parameters(Device& device) : device_(device), replicated_(device), sharded_(device) {}

  Id add_replicated(const std::string& name, std::vector<int64_t> shape, double init_limit, bool decays = true);
  // Adds a tensor of which the elements [first, first + size) are here.
  Id add_sharded(const std::string& name, std::vector<int64_t> shape, double init_limit, int64_t first, int64_t size);

  // Allocates all tensors, which must have been added, and sets random values. A tensor's depend on the seed and on how many
  // tensors were added before, not on how it is sharded. Throws Error.
  void initialise(uint64_t seed);

  // Makes one step of AdamW (arXiv:1711.05101) on both areas; step counts from 1.
  void step(int64_t step, double learning_rate, double weight_decay);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Tensor& tensor(Id id) const { return tensors_[id]; }
  Area& area(const Tensor& tensor) { return tensor.is_sharded ? sharded_ : replicated_; }
  Area& replicated() { return replicated_; }
  float* values(Id id) { return area(tensors_[id]).values.data() + tensors_[id].offset; }
  float* sharded_grads(Id id) { return sharded_.grads.data() + tensors_[id].offset; }

private:
  Id add(Tensor tensor);
  static void allocate(Area& area);

  Device& device_;
  std::vector<Tensor> tensors_;
  Area replicated_, sharded_;
};

// ChunkGrads are gradients of the replicated parameters, of each chunk of this rank.
class ChunkGrads {
public:
  ChunkGrads(Device& device, Parameters& parameters) : parameters_(parameters), all_(device) {}

  // Makes room for so many chunks, and sets all gradients to 0. Throws Error.
  void reset(int64_t num_chunks) {
    all_.resize(num_chunks * parameters_.replicated().size);
    all_.clear();
  }
  float* of(int64_t chunk, Parameters::Id id) {
    return all_.data() + chunk * parameters_.replicated().size + parameters_.tensor(id).offset;
  }
  // Returns [chunks, elements of the replicated area]; see Array::on_host.
  std::span<const float> on_host(std::vector<float>& mirror) const { return all_.on_host(mirror); }

private:
  Parameters& parameters_;
  Array<float> all_;
};

} // namespace train
