// SPDX-License-Identifier: Apache-2.0
#include "moe/gemm/sm90/instance.cuh"

namespace epx::moe::cuda::sm90 {

using Gemm = Instance<Pingpong, MMajorA, NMajorB, cutlass::bfloat16_t, false>;

const void* weight_gradient_kernel() {
  return Gemm::kernel();
}

cudaError_t launch_weight_gradient(const Groups& groups, const LaunchTarget& target) {
  return Gemm::launch(groups, false, target);
}

} // namespace epx::moe::cuda::sm90
