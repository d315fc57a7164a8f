// SPDX-License-Identifier: Apache-2.0
// Scratch is private memory of the host stages within a call, sized at group creation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/config.h"
#include "runtime/layout/rank_major.h"

namespace epx::host {

struct Scratch {
  explicit Scratch(const GroupShape& shape)
      : next_slot(static_cast<size_t>(shape.num_experts)), end_of_slots(static_cast<size_t>(shape.num_experts)),
        route_counts(static_cast<size_t>(shape.num_experts)), active(static_cast<size_t>(shape.num_ranks)),
        rows_base(static_cast<size_t>(shape.num_ranks)), weights_base(static_cast<size_t>(shape.num_ranks)),
        rows_to(static_cast<size_t>(shape.num_ranks)) {}

  static int64_t bytes(const GroupShape& shape) {
    return shape.num_experts * static_cast<int64_t>(2 * sizeof(int64_t) + sizeof(int32_t)) +
           shape.num_ranks *
               static_cast<int64_t>(sizeof(uint8_t) + sizeof(std::byte*) + sizeof(float*) + sizeof(RankMajorCounts));
  }

  std::vector<int64_t> next_slot;    // [E], prepare: slot of this rank's next route to each expert
  std::vector<int64_t> end_of_slots; // [E], prepare: the end of the slots of each expert's zone
  std::vector<int32_t> route_counts; // [E], prepare: routes of this rank to each expert
  std::vector<uint8_t> active;       // [P], movements: 1 where routes to and from that rank take part
  std::vector<std::byte*> rows_base; // [P], movements: that rank's receive rows in registered memory; NULL: not registered
  std::vector<const float*> weights_base; // [P], gather: the same for its receive weights
  std::vector<RankMajorCounts> rows_to;   // [P], dispatch_rank_major: what this rank has for that one
};

} // namespace epx::host
