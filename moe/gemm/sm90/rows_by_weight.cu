// SPDX-License-Identifier: Apache-2.0
#include "moe/gemm/sm90/instance.cuh"

namespace epx::moe::cuda::sm90 {

using Gemm = Instance<Cooperative, KMajorA, KMajorB, cutlass::bfloat16_t, false>;

const void* rows_by_weight_kernel() {
  return Gemm::kernel();
}

cudaError_t launch_rows_by_weight(const Groups& groups, const LaunchTarget& target) {
  return Gemm::launch(groups, false, target);
}

} // namespace epx::moe::cuda::sm90
