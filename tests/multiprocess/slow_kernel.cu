// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/slow_kernel.h"

#include <cstdint>

namespace epx::test {
namespace {

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
__global__ void spin(double clocks_per_ns) {
  const long long begin = clock64();
  const auto clocks = static_cast<long long>(static_cast<double>(now_ns() - begin_ns) * clocks_per_ns);
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
  spin<<<1, 1, 0, stream>>>(fraction * clock_khz / 1e6);
  return cudaGetLastError();
}

} // namespace epx::test
