// SPDX-License-Identifier: Apache-2.0
#include "moe/gemm/sm90/instance.cuh"

namespace epx::moe::cuda::sm90 {

using Gemm = Instance<Cooperative, KMajorA, NMajorB, cutlass::bfloat16_t, true>;

const void* rows_by_transposed_weight_kernel() {
  return Gemm::kernel();
}

cudaError_t launch_rows_by_transposed_weight(const Groups& groups, bool accumulate, const LaunchTarget& target) {
  return Gemm::launch(groups, accumulate, target);
}

} // namespace epx::moe::cuda::sm90
