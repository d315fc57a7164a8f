// SPDX-License-Identifier: Apache-2.0
// All instances are one translation unit: what they share of CUTLASS's headers takes as long to compile as two of them.
#include "moe/gemm/sm90/instances.h"

#include "moe/gemm/sm90/instance.cuh"

namespace epx::moe::cuda::sm90 {

using RowsByWeight = Instance<Cooperative, KMajorA, KMajorB, cutlass::bfloat16_t, false>;
using RowsByTransposedWeight = Instance<Cooperative, KMajorA, NMajorB, cutlass::bfloat16_t, true>;
using WeightGradient = Instance<Pingpong, MMajorA, NMajorB, cutlass::bfloat16_t, false>;
using WeightGradientFp32 = Instance<Pingpong, MMajorA, NMajorB, float, true>;

std::vector<const void*> instance_kernels() {
  return {RowsByWeight::kernel(), RowsByTransposedWeight::kernel(), WeightGradient::kernel(), WeightGradientFp32::kernel()};
}

cudaError_t launch_rows_by_weight(const Groups& groups, const LaunchTarget& target) {
  return RowsByWeight::launch(groups, false, target);
}

cudaError_t launch_rows_by_transposed_weight(const Groups& groups, bool accumulate, const LaunchTarget& target) {
  return RowsByTransposedWeight::launch(groups, accumulate, target);
}

cudaError_t launch_weight_gradient(const Groups& groups, const LaunchTarget& target) {
  return WeightGradient::launch(groups, false, target);
}

cudaError_t launch_weight_gradient_fp32(const Groups& groups, bool accumulate, const LaunchTarget& target) {
  return WeightGradientFp32::launch(groups, accumulate, target);
}

} // namespace epx::moe::cuda::sm90
