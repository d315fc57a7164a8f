// SPDX-License-Identifier: Apache-2.0
// Where the tensors of a block lie in its arena. The same functions measure and hand out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/block/plan.h"

namespace epx::moe {

// Hands out parts of an allocation, each aligned to 256 bytes, or only counts their bytes when there is none.
class Carver {
public:
  explicit Carver(std::byte* memory = nullptr) : memory_(memory) {}

  void* take(int64_t rows, int64_t columns, epx_dtype dtype);
  std::byte* take_bytes(int64_t bytes);
  int64_t bytes() const { return bytes_; }

private:
  std::byte* memory_;
  int64_t bytes_ = 0;
};

// What a forward leaves for its backward. Rows that peers reach are carved from `window`.
struct FlightTensors {
  FlightTensors(const BlockPlan& plan, Carver& window, Carver& local);

  void* recv_tokens;  // [N, H] dtype, of the window, as the next two
  void* expert_out;   // [N, H] dtype; with early weighting NULL, since the backward does not read it
  void* recv_weights; // [N] real
  std::byte* handle_mem;
  void* topk_idx;      // [T, K] INT32
  void* topk_weights;  // [T, K] real
  void* logits;        // [T, E] real, or BFLOAT16
  void* counts;        // [E_l] INT32
  void* offsets;       // [E_l + 1] INT32
  void* global_counts; // [P, E] INT32
  void* pre_act;       // [N, 2F or F] dtype; NULL where it is computed again
};

// What a call needs while it runs.
struct SharedTensors {
  SharedTensors(const BlockPlan& plan, Carver& window, Carver& local);

  void* grad_expert_out; // [N, H] dtype, of the window, as the next two; with early weighting also the forward's expert_out
  void* grad_recv;       // [N, H] dtype
  void* grad_recv_weights; // [N] real
  void* grad_topk_weights; // [T, K] real
  void* pre_act;           // [N, 2F or F] dtype; NULL unless it is computed again
  std::byte* workspace;    // of the router's and the FFN's calls on CUDA
  int64_t workspace_bytes;
};

// The bytes of both kinds.
struct Footprint {
  int64_t flight_window = 0, flight_local = 0, shared_window = 0, shared_local = 0;
};
Footprint footprint_of(const BlockPlan& plan);

} // namespace epx::moe
