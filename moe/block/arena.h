// SPDX-License-Identifier: Apache-2.0
// The memory of blocks: flights, and what a call needs while it runs, which all flights share.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "epx/epx.hpp"
#include "moe/block/layout.h"
#include "moe/block/memory.h"
#include "moe/block/plan.h"

namespace epx::moe {

class Arena {
public:
  // Collective over the group, which may be NULL. The first blocks that the arena serves are like the plan's.
  Arena(epx_group group, const BlockPlan& plan, int32_t num_flights);

  // Gives back what the group lends. Collective; before the destructor.
  void release();

  // Throws unless a block of this group, planned without an arena, fits. Returns the rows that its tensors have here.
  int64_t require_fit(epx_group group, const BlockPlan& plan) const;

  int32_t num_flights() const { return static_cast<int32_t>(flights_.size()); }
  epx_moe_arena_info info() const;
  int device() const { return device_; }
  int64_t add_block() { return ++num_blocks_; } // returns the number of a new block

  // Which forward has filled a flight.
  struct Filled {
    int64_t block = 0;       // its number, from 1
    int64_t num_tokens = -1; // -1: none that succeeded
    epx_dtype logits_dtype = EPX_DTYPE_UNSET;
  };
  Filled& filled(int32_t flight) { return flights_[static_cast<size_t>(flight)]; }

  FlightTensors flight_tensors(const BlockPlan& plan, int32_t flight) const;
  SharedTensors shared_tensors(const BlockPlan& plan) const;

  // Around what a call enqueues; nothing on the host.
  void begin_call(epx_stream stream);
  void end_call(epx_stream stream);

private:
  std::byte* window() const { return window_ ? window_.data() : host_window_.get(); }
  std::byte* local() const { return device_memory_ != nullptr ? device_memory_.get() : host_memory_.get(); }
  void allocate_local(int64_t bytes);

  GroupView group_;
  Footprint footprint_;
  int64_t num_rows_;
  std::vector<Filled> flights_;
  int device_ = -1;
  int64_t num_blocks_ = 0;
  Memory window_;          // with a group
  HostMemory host_window_; // without
  HostMemory host_memory_;
  cuda::DeviceMemory device_memory_{nullptr};
  std::optional<cuda::StreamOrder> order_;
};

} // namespace epx::moe
