// SPDX-License-Identifier: Apache-2.0
// Before each grouped GEMM of CUTLASS a small kernel turns the zones into groups, so that the host need not know how many
// rows they have.
//
//   warps        what they do                                                              what they wait for
//   of block 0   each thread writes the group of an expert                                 nothing
//   all          write zeros where a weight gradient has no rows to sum, and d is not      nothing
//                added to
#include "moe/gemm/sm90/sm90_gemm.h"

#include "base/device/launch.h"
#include "moe/cuda/warps.cuh"
#include "moe/gemm/gemm_workspace.h"
#include "moe/gemm/sm90/fp8_gemm.h"
#include "moe/gemm/sm90/instances.h"
#include "moe/gemm/zones.cuh"

namespace epx::moe::cuda::sm90 {
namespace {

struct GroupsParams {
  GroupedGemm gemm;
  Groups groups;
  int64_t d_bytes; // of an element
};

__device__ void fill_group(const GroupsParams& params, int expert) {
  const GroupedGemm& gemm = params.gemm;
  const Groups& groups = params.groups;
  const Zone zone = zone_of(gemm.zones, expert);
  const bool is_gradient = gemm.product == Product::kWeightGradient;
  const bool has_rows = zone.num_rows > 0;
  // TMA knows no tensor without elements. No tensormap is made of a group without rows of d, whatever its inner size is.
  int32_t* const sizes = groups.sizes + 3 * expert;
  sizes[0] = static_cast<int32_t>(is_gradient ? (has_rows ? gemm.m : 0) : zone.num_rows);
  sizes[1] = static_cast<int32_t>(gemm.n);
  sizes[2] = static_cast<int32_t>(is_gradient ? zone.num_rows : gemm.k);
  const auto element_at = [&](const void* data, int64_t i) { return static_cast<const uint16_t*>(data) + i; };
  groups.a[expert] = element_at(gemm.a, zone.first_row * gemm.a_stride);
  groups.b[expert] = element_at(gemm.b, (is_gradient ? zone.first_row : expert) * gemm.b_stride);
  groups.d[expert] = static_cast<char*>(gemm.d) + (is_gradient ? expert : zone.first_row) * gemm.d_stride * params.d_bytes;
  groups.a_strides[expert] = gemm.a_stride;
  groups.b_strides[expert] = is_gradient ? gemm.b_stride : gemm.product == Product::kRowsByWeight ? gemm.k : gemm.n;
  groups.d_strides[expert] = is_gradient ? gemm.n : gemm.d_stride;
}

// Writes zeros to the gradients of the experts that have no rows. All threads of the grid call this.
__device__ void clear_empty(const GroupsParams& params) {
  const GroupedGemm& gemm = params.gemm;
  const int64_t vectors = gemm.m * gemm.n * params.d_bytes / static_cast<int64_t>(sizeof(uint4));
  for (int base = 0; base < gemm.zones.num_experts; base += kWarp) {
    const int expert = base + lane();
    const bool is_empty = expert < gemm.zones.num_experts && zone_of(gemm.zones, expert).num_rows == 0;
    for (unsigned empty = __ballot_sync(~0u, is_empty); empty != 0; empty &= empty - 1) {
      auto* const d =
          reinterpret_cast<uint4*>(static_cast<char*>(gemm.d) + (base + __ffs(empty) - 1) * gemm.d_stride * params.d_bytes);
      for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < vectors; i += gridDim.x * int64_t{kThreads})
        d[i] = uint4{};
    }
  }
}

__global__ void __launch_bounds__(kThreads) make_groups_kernel(const __grid_constant__ GroupsParams params) {
  if (blockIdx.x == 0)
    for (int expert = static_cast<int>(threadIdx.x); expert < params.gemm.zones.num_experts; expert += kThreads)
      fill_group(params, expert);
  if (params.gemm.product == Product::kWeightGradient && !params.gemm.accumulate) clear_empty(params);
}

Groups groups_of(const GroupedGemm& gemm) {
  auto* next = static_cast<std::byte*>(gemm.tensor_core_workspace);
  const auto take = [&](auto*& array, size_t count) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next);
    next += count * sizeof(*array);
  };
  Groups groups;
  groups.num_groups = gemm.zones.num_experts;
  groups.tensormaps = next;
  groups.tensormaps_bytes = kTensormapsBytes;
  next += kTensormapsBytes;
  const auto num_groups = static_cast<size_t>(groups.num_groups);
  take(groups.a, num_groups);
  take(groups.b, num_groups);
  take(groups.d, num_groups);
  take(groups.a_strides, num_groups);
  take(groups.b_strides, num_groups);
  take(groups.d_strides, num_groups);
  take(groups.sizes, 3 * num_groups);
  return groups;
}

} // namespace

std::vector<const void*> gemm_kernels(epx_dtype in_dtype) {
  if (in_dtype == EPX_FLOAT8_E4M3) return fp8_gemm_kernels();
  std::vector<const void*> kernels = instance_kernels();
  kernels.push_back(reinterpret_cast<const void*>(&make_groups_kernel));
  return kernels;
}

cudaError_t launch_gemm(const GroupedGemm& gemm, const LaunchTarget& target) {
  if (gemm.in_dtype == EPX_FLOAT8_E4M3) return launch_fp8_gemm(gemm, target);
  const bool is_fp32 = gemm.out_dtype == EPX_FLOAT32;
  const Groups groups = groups_of(gemm);
  const bool clears = gemm.product == Product::kWeightGradient && !gemm.accumulate;
  const epx::cuda::Grid grid{clears ? target.num_sms * kBlocksPerSm : 1, kThreads};
  const cudaError_t error =
      epx::cuda::launch(&make_groups_kernel, grid, stream_of(target), GroupsParams{gemm, groups, is_fp32 ? 4 : 2});
  if (error != cudaSuccess) return error;
  switch (gemm.product) {
  case Product::kRowsByWeight:
    return launch_rows_by_weight(groups, target);
  case Product::kRowsByTransposedWeight:
    return launch_rows_by_transposed_weight(groups, gemm.accumulate, target);
  case Product::kWeightGradient:
    break;
  }
  if (is_fp32) return launch_weight_gradient_fp32(groups, gemm.accumulate, target);
  return launch_weight_gradient(groups, target);
}

} // namespace epx::moe::cuda::sm90
