// SPDX-License-Identifier: Apache-2.0
// The FSDP axis of a mesh: parameters of experts are gathered from its ranks before they are used, and their gradients go back
// to the ranks that keep them.
#pragma once

#include <cstdint>

#include "apps/train_moe/array.h"
#include "apps/train_moe/device.h"
#include "apps/train_moe/mesh.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/parameters.h"
#include "apps/train_moe/world.h"
#include "epx/epx.hpp"

namespace train {

// Bytes that have come to this rank from others.
struct Traffic {
  int64_t gathered = 0; // parameters
  int64_t reduced = 0;  // gradients
};

// A float32 matrix of which each rank of an axis keeps a run of rows, in rank order.
struct SplitMatrix {
  SplitMatrix(Device& device, const Axis& axis, int64_t rows, int64_t width);

  int64_t size() const { return rows * width; }

  int64_t rows, width;
  Axis axis;
  Ownership mine;
  int64_t most_rows; // that a rank keeps

  // [P] integers that slices are made of, in memory of the device. All but zeros are in rows.
  enum Integers {
    zeros,
    firsts,   // of the part of each rank
    counts,   // likewise
    landings, // where each rank has this one's rows of its part
    my_first, // of this rank's part, P times
    my_count, // likewise
    kNumIntegers
  };
  epx::ConstTensor integers(Integers which) const {
    return {all_.data() + int64_t{which} * axis.size, EPX_INT32, {axis.size}};
  }

private:
  Array<int32_t> all_; // [kNumIntegers, P]
};

class FsdpAxis {
public:
  // Collective over all ranks. The device must outlive the axis.
  FsdpAxis(const World& world, Device& device, const Options& options, const Mesh& mesh);
  ~FsdpAxis();
  FsdpAxis(const FsdpAxis&) = delete;
  FsdpAxis& operator=(const FsdpAxis&) = delete;

  const Axis& axis() const { return axis_; }
  epx::GroupView group() const { return group_; }
  Device& device() const { return device_; }
  const Traffic& traffic() const { return traffic_; } // so far

  // Those that follow are collective over the axis.

  // Returns memory for a whole matrix that all_gather() may write, as long as the axis lives.
  float* allocate(const SplitMatrix& matrix);
  // Makes room for parts of such sums.
  void reserve_sums(const SplitMatrix& matrix);
  // whole = the parts of all ranks
  void all_gather(const SplitMatrix& matrix, const float* part, float* whole);
  // part = this rank's rows of all ranks' wholes, summed in rank order
  void reduce_scatter(const SplitMatrix& matrix, const float* whole, float* part);

  // Returns memory for whole gradients, until the next call.
  float* room_for_grads(int64_t size);

private:
  float* allocate(int64_t size); // memory that peers reach

  Device& device_;
  Axis axis_;
  epx::Group group_;
  float* landing_ = nullptr; // where parts of sums arrive
  int64_t landing_size_ = 0;
  Array<float> grads_;
  Traffic traffic_;
};

// The experts of one layer on this rank, whole. Without an axis they are where parameters and gradients are kept.
class WholeExperts {
public:
  // Collective over the axis, which may be NULL. It and the parameters must outlive this.
  WholeExperts(FsdpAxis* axis, Device& device, Parameters& parameters, const ModelOptions& model, Parameters::Id gate_up,
               Parameters::Id down, int64_t count);

  int64_t count() const { return count_; }

  // Makes the values those of the parameters. Collective.
  void gather();
  const float* gate_up() const { return values(gate_up_); } // [count, 2F, H]
  const float* down() const { return values(down_); }       // [count, H, F]

  // A backward takes room for its gradients, writes them, and has them reduced. Collective.
  struct Grads {
    float* gate_up;
    float* down;
  };
  Grads room_for_grads();
  void reduce(const Grads& grads);

private:
  struct Matrix {
    Parameters::Id id;
    SplitMatrix split;
    float* whole = nullptr; // with an axis
  };
  const float* values(const Matrix& matrix) const;

  FsdpAxis* axis_; // NULL also where there are no experts
  Parameters& parameters_;
  int64_t count_;
  Matrix gate_up_, down_;
};

} // namespace train
