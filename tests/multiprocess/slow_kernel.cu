// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/slow_kernel.h"

#include <cstdint>

namespace epx::test {
namespace {

// A kernel that spins for less would end while the next one is being launched, and slow nothing.
constexpr double kShortestSpinNs = 2000;
// What a call takes beside the time from one kernel's begin to the other's: the two launches, as one H200 replays a graph of
// them.
constexpr double kUnseenNs = 3000;

__device__ uint64_t begin_ns;

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

__global__ void note_begin() {
  begin_ns = now_ns();
}

// %globaltimer may tick in microseconds only, so the spin, which is shorter than the call, counts clocks of its SM.
__global__ void spin(double fraction, double clocks_per_ns) {
  const long long begin = clock64();
  const double elapsed_ns = static_cast<double>(now_ns() - begin_ns) + kShortestSpinNs + kUnseenNs;
  const auto clocks = static_cast<long long>((kShortestSpinNs + fraction * elapsed_ns) * clocks_per_ns);
  while (clock64() - begin < clocks) {
  }
}

} // namespace

cudaError_t launch_note_begin(cudaStream_t stream) {
  note_begin<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

cudaError_t launch_spin(double fraction, cudaStream_t stream) {
  int device = 0, clock_khz = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device);
  if (error != cudaSuccess) return error;
  spin<<<1, 1, 0, stream>>>(fraction, clock_khz / 1e6);
  return cudaGetLastError();
}

} // namespace epx::test
