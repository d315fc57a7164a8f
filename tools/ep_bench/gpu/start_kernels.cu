// SPDX-License-Identifier: Apache-2.0
// Warps of the kernels of a StreamBlocker:
//
//   kernel           threads    what a thread does, and what it waits for
//   gate_kernel      one        waits for the ticket, a word of the host's memory, or for the timeout
//   barrier_kernel   one/rank   stores the round into the ready flag on that rank, and waits for that rank's ready flag here,
//                               or for the timeout
#include "tools/ep_bench/gpu/start_kernels.h"

#include "base/device/launch.h"
#include "base/device/memory_order.cuh"

namespace epx::bench {
namespace {

using namespace cuda; // base/device

__global__ void gate_kernel(const uint64_t* ticket, uint64_t wanted, uint64_t timeout_ns) {
  const uint64_t begin = nanoseconds();
  while (load_acquire_sys(ticket) < wanted && nanoseconds() - begin < timeout_ns) {
  }
}

__global__ void barrier_kernel(const __grid_constant__ BarrierParams params) {
  const int peer = static_cast<int>(threadIdx.x);
  BarrierBoard* const mine = params.boards[params.rank];
  if (load_acquire_sys(&mine->missing) != 0) return;
  store_release_sys(&params.boards[peer]->ready_flags[params.rank].round, params.round);
  const uint64_t begin = nanoseconds();
  while (load_acquire_sys(&mine->ready_flags[peer].round) < params.round)
    if (nanoseconds() - begin > params.timeout_ns) {
      atomicOr(reinterpret_cast<unsigned long long*>(&mine->missing), 1ull << peer);
      return;
    }
}

} // namespace

cudaError_t launch_gate(const uint64_t* ticket, uint64_t wanted, uint64_t timeout_ns, cudaStream_t stream) {
  return launch(&gate_kernel, {1, 1}, stream, ticket, wanted, timeout_ns);
}

cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream) {
  return launch(&barrier_kernel, {1, params.num_ranks}, stream, params);
}

cudaError_t load_start_kernels() {
  const cudaError_t error = load(&gate_kernel);
  return error != cudaSuccess ? error : load(&barrier_kernel);
}

} // namespace epx::bench
