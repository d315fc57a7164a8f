// SPDX-License-Identifier: Apache-2.0
#include "moe/gemm/sm90/instance.cuh"

namespace epx::moe::cuda::sm90 {

cudaError_t launch_rows_by_transposed_weight(const Groups& groups, bool accumulate, const LaunchTarget& target) {
  return Instance<Cooperative, KMajorA, NMajorB, cutlass::bfloat16_t, true>::launch(groups, accumulate, target);
}

} // namespace epx::moe::cuda::sm90
