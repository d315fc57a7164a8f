// The kernels of a StreamBlocker.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace epx::bench {

inline constexpr int kMaxRanksOnGpus = 64;

// A rank's memory that the others store into: where each of them has got to.
struct StartBoard {
  struct alignas(128) Arrival { // a line each: peers store at the same time
    uint64_t round;
  };
  Arrival arrivals[kMaxRanksOnGpus]; // by source rank
  uint64_t missing;                  // ranks that this one has waited for in vain, a bit each; its own kernels only
};

struct BarrierParams {
  StartBoard* boards[kMaxRanksOnGpus]; // of each rank
  int rank;
  int num_ranks;
  uint64_t round; // from 1
  uint64_t timeout_ns;
};

// Ends when *ticket, a word of the host, has reached `wanted`, or after timeout_ns nanoseconds.
cudaError_t launch_gate(const uint64_t* ticket, uint64_t wanted, uint64_t timeout_ns, cudaStream_t stream);

// Ends when every rank's stream has come to the same round. A rank that does not come in time is marked as missing, and
// from then on this rank waits for nobody.
cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream);

cudaError_t load_start_kernels();

} // namespace epx::bench
