// SPDX-License-Identifier: Apache-2.0
// All instances are one translation unit: what they share of CUTLASS's headers takes as long to compile as two of them.
#include "moe/gemm/sm90/instances.h"

#include "moe/gemm/sm90/instance.cuh"

namespace epx::moe::cuda::sm90 {

using RowsByWeight = Instance<Cooperative, Bf16Operands<KMajorA, KMajorB>, cutlass::bfloat16_t, false>;
using RowsByTransposedWeight = Instance<Cooperative, Bf16Operands<KMajorA, NMajorB>, cutlass::bfloat16_t, true>;
using WeightGradient = Instance<Pingpong, Bf16Operands<MMajorA, NMajorB>, cutlass::bfloat16_t, false>;
using WeightGradientFp32 = Instance<Pingpong, Bf16Operands<MMajorA, NMajorB>, float, true>;

using ScaledRowsAndWeights = Fp8Operands<kQuantiseBlock, cute::GMMA::Major::K>;
using ScaledColumns = Fp8Operands<1, cute::GMMA::Major::MN>;
using Fp8RowsByWeight = Instance<Fp8Cooperative, ScaledRowsAndWeights, cutlass::bfloat16_t, false>;
using Fp8RowsByWeightAdded = Instance<Fp8Cooperative, ScaledRowsAndWeights, cutlass::bfloat16_t, true>;
using Fp8WeightGradient = Instance<Fp8Cooperative, ScaledColumns, cutlass::bfloat16_t, false>;
using Fp8WeightGradientFp32 = Instance<Fp8Cooperative, ScaledColumns, float, true>;

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

std::vector<const void*> fp8_instance_kernels() {
  return {Fp8RowsByWeight::kernel(), Fp8RowsByWeightAdded::kernel(), Fp8WeightGradient::kernel(),
          Fp8WeightGradientFp32::kernel()};
}

cudaError_t launch_fp8_rows_by_weight(const Groups& groups, bool accumulate, const LaunchTarget& target) {
  if (accumulate) return Fp8RowsByWeightAdded::launch(groups, true, target);
  return Fp8RowsByWeight::launch(groups, false, target);
}

cudaError_t launch_fp8_weight_gradient(const Groups& groups, const LaunchTarget& target) {
  return Fp8WeightGradient::launch(groups, false, target);
}

cudaError_t launch_fp8_weight_gradient_fp32(const Groups& groups, bool accumulate, const LaunchTarget& target) {
  return Fp8WeightGradientFp32::launch(groups, accumulate, target);
}

} // namespace epx::moe::cuda::sm90
