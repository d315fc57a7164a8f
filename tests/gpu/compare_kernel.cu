// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/compare_kernel.h"

#include "base/device/launch.h"

namespace epx::test {
namespace {

struct Comparison {
  const std::byte* one;
  const std::byte* other;
  size_t bytes;
  unsigned long long* count;
};

__global__ void compare_kernel(const __grid_constant__ Comparison comparison) {
  unsigned long long differences = 0;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < comparison.bytes; i += gridDim.x * blockDim.x)
    differences += comparison.one[i] != comparison.other[i] ? 1 : 0;
  if (differences != 0) atomicAdd(comparison.count, differences);
}

} // namespace

cudaError_t count_differences(const std::byte* one, const std::byte* other, size_t bytes, unsigned long long* count,
                              cudaStream_t stream) {
  return cuda::launch_cooperative(&compare_kernel, {4, 256}, stream, Comparison{one, other, bytes, count});
}

} // namespace epx::test
