// SPDX-License-Identifier: Apache-2.0
// Where tensors lie in the arena. The constructors that lay them out also measure: memory that is NULL is only counted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx.hpp"
#include "moe/block/plan.h"

namespace epx::moe {

// Hands out parts of an allocation, each aligned to 256 bytes, or only counts their bytes when there is none.
class Carver {
public:
  explicit Carver(std::byte* memory = nullptr) : memory_(memory) {}

  Tensor take(epx_dtype dtype, Shape shape); // one or two dimensions
  std::byte* take_bytes(int64_t bytes);
  int64_t bytes() const { return bytes_; }

private:
  std::byte* memory_;
  int64_t bytes_ = 0;
};

// The bytes of each kind of memory of an arena: what one flight keeps from its forward to its backward, and what a call needs
// while it runs, which all flights share. Peers reach the windows.
struct Footprint {
  int64_t flight_window = 0, flight_local = 0, shared_window = 0, shared_local = 0;
};

// The memory of one call, for the tensors of the block and then for those of its path.
struct CallMemory {
  Carver flight_window, flight_local, shared_window, shared_local;

  Footprint footprint() const {
    return {flight_window.bytes(), flight_local.bytes(), shared_window.bytes(), shared_local.bytes()};
  }
};

// What the router writes and reads, whatever the path.
struct RoutingTensors {
  // For num_tokens tokens, in memory that has room for the plan's max_tokens, and logits of the plan's `real` or narrower.
  RoutingTensors(const BlockPlan& plan, int64_t num_tokens, epx_dtype logits_dtype, CallMemory& memory);

  // Of the flight.
  Tensor topk_idx;      // [T, K] INT32
  Tensor topk_weights;  // [T, K] real
  Tensor logits;        // [T, E]
  Tensor global_counts; // [P, E] INT32
  // Shared.
  Tensor grad_topk_weights; // [T, K] real
};

} // namespace epx::moe
