// SPDX-License-Identifier: Apache-2.0
#include "moe/gemm/sm90/instance.cuh"

namespace epx::moe::cuda::sm90 {

using Gemm = Instance<Pingpong, MMajorA, NMajorB, float, true>;

const void* weight_gradient_fp32_kernel() {
  return Gemm::kernel();
}

cudaError_t launch_weight_gradient_fp32(const Groups& groups, bool accumulate, const LaunchTarget& target) {
  return Gemm::launch(groups, accumulate, target);
}

} // namespace epx::moe::cuda::sm90
