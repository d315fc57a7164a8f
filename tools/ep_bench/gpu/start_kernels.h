// SPDX-License-Identifier: Apache-2.0
// A StreamBlocker launches these kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace epx::bench {

inline constexpr int kMaxRanksOnGpus = 64;

// A BarrierBoard is one rank's memory into which the others store the round that they have reached.
struct BarrierBoard {
  struct alignas(128) ReadyFlag { // each has a cache line of its own, since peers store at the same time
    uint64_t round;
  };
  ReadyFlag ready_flags[kMaxRanksOnGpus]; // by source rank
  uint64_t missing; // ranks that did not come in time, one bit each; only this rank's kernels write it
};

struct BarrierParams {
  BarrierBoard* boards[kMaxRanksOnGpus]; // by rank
  int rank;
  int num_ranks;
  uint64_t round; // from 1
  uint64_t timeout_ns;
};

// Launches a kernel that ends when *ticket, a word of the host's memory, has reached `wanted`, or after timeout_ns nanoseconds.
cudaError_t launch_gate(const uint64_t* ticket, uint64_t wanted, uint64_t timeout_ns, cudaStream_t stream);

// Launches a kernel that ends when every rank's stream has come to the same round. It marks a rank that does not come in time
// as missing, and from then on this rank waits for no other.
cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream);

cudaError_t load_start_kernels();

} // namespace epx::bench
