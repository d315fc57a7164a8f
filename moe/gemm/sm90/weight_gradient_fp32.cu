// SPDX-License-Identifier: Apache-2.0
#include "moe/gemm/sm90/instance.cuh"

namespace epx::moe::cuda::sm90 {

cudaError_t launch_weight_gradient_fp32(const Groups& groups, bool accumulate, const LaunchTarget& target) {
  return Instance<Pingpong, MMajorA, NMajorB, float, true>::launch(groups, accumulate, target);
}

} // namespace epx::moe::cuda::sm90
