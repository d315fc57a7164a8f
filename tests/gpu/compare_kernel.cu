// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/compare_kernel.h"

#include <cstdint>

#include <vector_types.h>

#include "base/device/launch.h"

namespace epx::test {
namespace {

constexpr size_t kWordBytes = sizeof(uint4);

struct Comparison {
  const std::byte* one;
  const std::byte* other;
  size_t words; // of 16 bytes, from the beginning; the rest is compared by bytes
  size_t bytes;
  unsigned long long* count;
};

__device__ int differing_bytes(uint32_t one, uint32_t other) {
  int count = 0;
  for (uint32_t bits = one ^ other; bits != 0; bits >>= 8)
    count += (bits & 0xff) != 0 ? 1 : 0;
  return count;
}

__global__ void compare_kernel(const __grid_constant__ Comparison comparison) {
  constexpr int kInFlight = 4; // a thread issues the loads of so many words of each buffer before it compares them
  const auto* const ones = reinterpret_cast<const uint4*>(comparison.one);
  const auto* const others = reinterpret_cast<const uint4*>(comparison.other);
  const size_t threads = gridDim.x * blockDim.x;
  const size_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long differences = 0;
  for (size_t first = thread; first < comparison.words; first += kInFlight * threads) {
    uint4 one[kInFlight] = {}, other[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (const size_t word = first + i * threads; word < comparison.words) {
        one[i] = ones[word];
        other[i] = others[word];
      }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      differences += differing_bytes(one[i].x, other[i].x) + differing_bytes(one[i].y, other[i].y) +
                     differing_bytes(one[i].z, other[i].z) + differing_bytes(one[i].w, other[i].w);
  }
  for (size_t i = comparison.words * kWordBytes + thread; i < comparison.bytes; i += threads)
    differences += comparison.one[i] != comparison.other[i] ? 1 : 0;
  if (differences != 0) atomicAdd(comparison.count, differences);
}

} // namespace

cudaError_t count_differences(const std::byte* one, const std::byte* other, size_t bytes, unsigned long long* count,
                              cudaStream_t stream) {
  const auto address_bits = reinterpret_cast<uintptr_t>(one) | reinterpret_cast<uintptr_t>(other);
  const size_t words = address_bits % kWordBytes == 0 ? bytes / kWordBytes : 0;
  return cuda::launch_cooperative(&compare_kernel, {4, 256}, stream, Comparison{one, other, words, bytes, count});
}

} // namespace epx::test
