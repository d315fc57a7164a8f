// SPDX-License-Identifier: Apache-2.0
// An axis of a mesh over which parameters are split (FSDP): they are gathered before they are used, and their gradients go back
// to the ranks that keep them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "apps/train_moe/array.h"
#include "apps/train_moe/device.h"
#include "apps/train_moe/mesh.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/world.h"
#include "epx/epx.hpp"

namespace train {

int64_t bytes_of(epx_dtype dtype, int64_t elements);

// Bytes that have come to this rank from others.
struct Traffic {
  int64_t gathered = 0; // parameters
  int64_t reduced = 0;  // gradients
};

// A matrix of which each rank of an axis keeps a run of rows, in rank order.
struct SplitMatrix {
  // Ranks keep multiples of `unit` rows.
  SplitMatrix(Device& device, const Axis& axis, int64_t rows, int64_t width, int64_t unit = 1);

  int64_t size() const { return rows * width; }
  int64_t kept_size() const { return mine.count * width; } // of this rank
  Ownership part(int rank) const { return ownership(rows, {rank, axis.size}, unit); }

  int64_t rows, width, unit;
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
  // Collective over all ranks. The axis is of the ranks that name the same `first`, the rank of the job that is its first. The device
  // must outlive it.
  FsdpAxis(const World& world, Device& device, const Options& options, const Axis& axis, int first);
  ~FsdpAxis();
  FsdpAxis(const FsdpAxis&) = delete;
  FsdpAxis& operator=(const FsdpAxis&) = delete;

  const Axis& axis() const { return axis_; }
  epx::GroupView group() const { return group_; }
  const Traffic& traffic() const { return traffic_; } // so far

  // Those that follow are collective over the axis.

  // Memory for a matrix, as long as the axis lives: a rank writes what it keeps to `part`, and all_gather() makes `whole` of it.
  struct Memory {
    void* part;
    void* whole;
  };
  Memory allocate(const SplitMatrix& matrix, epx_dtype dtype);
  // Makes room for parts of such sums.
  void reserve_sums(const SplitMatrix& matrix);
  // On the device's side stream. By copy engines where there are any and all ranks keep as much, else by epx.
  void all_gather(const SplitMatrix& matrix, epx_dtype dtype, const Memory& memory);
  // part = this rank's rows of all ranks' wholes, summed in rank order in float32. They travel in options.fsdp_grads.
  void reduce_scatter(const SplitMatrix& matrix, const float* whole, float* part);

  // Returns memory for whole gradients, until the next call.
  float* room_for_grads(int64_t size);

private:
  struct Slices;
  bool has_copy_engines_for(const SplitMatrix& matrix) const;
  void* allocate(int64_t bytes); // that peers reach through the group
  void move(const SplitMatrix& matrix, const Slices& slices, epx_stream stream, const epx::ConstTensor& operand,
            const epx::Tensor& output);

  Device& device_;
  Axis axis_;
  epx::Group group_;
  std::unique_ptr<epx::CopyEngineGather> copy_engines_;
  std::vector<Array<uint8_t>> parts_;
  bool rounds_grads_;
  void* landing_ = nullptr; // where parts of sums arrive
  int64_t landing_size_ = 0;
  Array<float> grads_, widened_;
  Array<Bfloat16> rounded_;
  Traffic traffic_;
};

} // namespace train
