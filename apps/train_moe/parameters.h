// SPDX-License-Identifier: Apache-2.0
// Parameters has all parameters of a model, their gradients and AdamW's moments, in two flat areas of a Device. *Sharded* tensors
// are those of experts, of which a run of the elements is here. Every rank computes with *shared* ones. Where these are split
// over an FSDP axis, each rank keeps a run of their area, and gathers the rest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/train_moe/array.h"
#include "apps/train_moe/device.h"
#include "apps/train_moe/fsdp.h"

namespace train {

struct Tensor {
  std::string name;
  std::vector<int64_t> shape; // shape of the whole tensor
  bool is_sharded = false;
  bool decays = true;
  double init_limit = 0;    // uniform in [-limit, limit)
  int64_t first = 0;        // the first element that this rank keeps
  int64_t size = 0;         // elements that it keeps
  int64_t offset = 0;       // elements, in the arrays of its area
  int64_t whole_offset = 0; // of a shared tensor, in whole values and gradients
  int64_t whole_size() const;
};

struct Area {
  explicit Area(Device& device) : values(device), grads(device), first_moments(device), second_moments(device) {}

  int64_t size = 0; // elements that this rank keeps
  Array<float> values, grads, first_moments, second_moments;
};

class Parameters {
public:
  using Id = int;

  explicit Parameters(Device& device) : device_(device), shared_(device), sharded_(device) {}

  Id add_shared(const std::string& name, std::vector<int64_t> shape, double init_limit, bool decays = true);
  // Adds a tensor of which the elements [first, first + size) are here.
  Id add_sharded(const std::string& name, std::vector<int64_t> shape, double init_limit, int64_t first, int64_t size);

  // Allocates all tensors, which must have been added, and sets random values. A tensor's depend on the seed and on how many
  // tensors were added before, not on who keeps it. Shared tensors are split over the axis, which may be NULL and must
  // outlive this. Throws Error.
  void initialise(uint64_t seed, FsdpAxis* axis);

  // Makes the shared values whole, as they are after the last step. Collective over the axis.
  void gather();

  // Makes one step of AdamW (arXiv:1711.05101) on both areas; step counts from 1.
  void step(int64_t step, double learning_rate, double weight_decay);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Tensor& tensor(Id id) const { return tensors_[id]; }
  Area& area(const Tensor& tensor) { return tensor.is_sharded ? sharded_ : shared_; }
  bool is_split(const Tensor& tensor) const { return tensor.is_sharded || axis_ != nullptr; } // is no rank's whole
  int64_t shared_size() const { return shared_size_; } // of all shared tensors, with what fills the last row
  // The elements of them that each rank keeps, [P]; empty where all keep all.
  std::vector<int64_t> shared_parts() const;
  Area& shared() { return shared_; }
  // Of what is here of a sharded tensor, or of a whole shared one.
  float* values(Id id);
  float* sharded_grads(Id id) { return sharded_.grads.data() + tensors_[id].offset; }

private:
  Id add(Tensor tensor);
  static void allocate(Area& area);

  void split(FsdpAxis* axis);

  Device& device_;
  std::vector<Tensor> tensors_;
  Area shared_, sharded_;
  int64_t shared_size_ = 0;
  FsdpAxis* axis_ = nullptr;        // of the shared tensors
  std::optional<SplitMatrix> rows_; // of their area, with an axis
  FsdpAxis::Memory memory_{};       // of the values, likewise
};

// ChunkGrads are gradients of the shared parameters, of each chunk of this rank.
class ChunkGrads {
public:
  ChunkGrads(Device& device, Parameters& parameters) : parameters_(parameters), all_(device) {}

  // Makes room for so many chunks, and sets all gradients to 0. Throws Error.
  void reset(int64_t num_chunks) {
    all_.resize(num_chunks * parameters_.shared_size());
    all_.clear();
  }
  float* of(int64_t chunk, Parameters::Id id) {
    return all_.data() + chunk * parameters_.shared_size() + parameters_.tensor(id).whole_offset;
  }
  // Returns [chunks, elements of the shared area]; see Array::on_host.
  std::span<const float> on_host(std::vector<float>& mirror) const { return all_.on_host(mirror); }

private:
  Parameters& parameters_;
  Array<float> all_;
};

} // namespace train
