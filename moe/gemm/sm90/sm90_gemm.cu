// SPDX-License-Identifier: Apache-2.0
// Before each grouped GEMM a small kernel turns the zones into groups, so that the host need not know how many rows they have.
//
//   warps        what they do                                                              what they wait for
//   of block 0   each thread writes the group of an expert                                 nothing
//   all          write zeros where a weight gradient has no rows to sum, and d is not      nothing
//                added to
#include "moe/gemm/sm90/sm90_gemm.h"

#include "base/device/launch.h"
#include "moe/cuda/warps.cuh"
#include "moe/gemm/gemm_workspace.h"
#include "moe/gemm/sm90/instances.h"
#include "moe/gemm/zones.cuh"

namespace epx::moe::cuda::sm90 {
namespace {

struct GroupsParams {
  GroupedGemm gemm;
  Groups groups;
  int64_t in_bytes, d_bytes; // of an element
};

// The zone of an expert's product. TMA reads columns from aligned addresses only: a zone that begins elsewhere has no product.
__device__ Zone readable_zone_of(const GroupedGemm& gemm, int expert) {
  Zone zone = zone_of(gemm.zones, expert);
  if (has_columns(gemm) && zone.first_row % static_cast<int64_t>(kTmaAlignment) != 0) zone.num_rows = 0;
  return zone;
}

__device__ void fill_group(const GroupsParams& params, int expert) {
  const GroupedGemm& gemm = params.gemm;
  const Groups& groups = params.groups;
  const Zone zone = readable_zone_of(gemm, expert);
  const bool is_gradient = gemm.product == Product::kWeightGradient;
  const bool has_rows = zone.num_rows > 0;
  // TMA knows no tensor without elements. No tensormap is made of a group without rows of d, whatever its inner size is.
  int32_t* const sizes = groups.sizes + 3 * expert;
  sizes[0] = static_cast<int32_t>(is_gradient ? (has_rows ? gemm.m : 0) : zone.num_rows);
  sizes[1] = static_cast<int32_t>(gemm.n);
  sizes[2] = static_cast<int32_t>(is_gradient ? zone.num_rows : gemm.k);
  const auto element_at = [&](const void* data, int64_t i) { return static_cast<const char*>(data) + i * params.in_bytes; };
  const auto zone_at = [&](const void* data, int64_t stride) {
    return element_at(data, zone.first_row * (has_columns(gemm) ? 1 : stride));
  };
  groups.a[expert] = zone_at(gemm.a, gemm.a_stride);
  groups.b[expert] = is_gradient ? zone_at(gemm.b, gemm.b_stride) : element_at(gemm.b, expert * gemm.b_stride);
  if (gemm.a_scales != nullptr) {
    const ScaleOffsets scales = scale_offsets(gemm, zone, expert);
    groups.a_scales[expert] = gemm.a_scales + scales.a;
    groups.b_scales[expert] = gemm.b_scales + scales.b;
  }
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
    const bool is_empty = expert < gemm.zones.num_experts && readable_zone_of(gemm, expert).num_rows == 0;
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
  take(groups.a_scales, num_groups);
  take(groups.b_scales, num_groups);
  take(groups.a_strides, num_groups);
  take(groups.b_strides, num_groups);
  take(groups.d_strides, num_groups);
  take(groups.sizes, 3 * num_groups);
  return groups;
}

} // namespace

std::vector<const void*> gemm_kernels(epx_dtype in_dtype) {
  std::vector<const void*> kernels = in_dtype == EPX_FLOAT8_E4M3 ? fp8_instance_kernels() : instance_kernels();
  kernels.push_back(reinterpret_cast<const void*>(&make_groups_kernel));
  return kernels;
}

cudaError_t launch_gemm(const GroupedGemm& gemm, const LaunchTarget& target) {
  const bool is_fp32 = gemm.out_dtype == EPX_FLOAT32, is_fp8 = gemm.in_dtype == EPX_FLOAT8_E4M3;
  const Groups groups = groups_of(gemm);
  const bool clears = gemm.product == Product::kWeightGradient && !gemm.accumulate;
  const epx::cuda::Grid grid{clears ? target.num_sms * kBlocksPerSm : 1, kThreads};
  const cudaError_t error = epx::cuda::launch(&make_groups_kernel, grid, stream_of(target),
                                              GroupsParams{gemm, groups, is_fp8 ? 1 : 2, is_fp32 ? 4 : 2});
  if (error != cudaSuccess) return error;
  switch (gemm.product) {
  case Product::kRowsByWeight:
    if (is_fp8) return launch_fp8_rows_by_weight(groups, gemm.accumulate, target);
    return launch_rows_by_weight(groups, target);
  case Product::kRowsByTransposedWeight:
    return launch_rows_by_transposed_weight(groups, gemm.accumulate, target);
  case Product::kWeightGradient:
    break;
  }
  if (is_fp8 && is_fp32) return launch_fp8_weight_gradient_fp32(groups, gemm.accumulate, target);
  if (is_fp8) return launch_fp8_weight_gradient(groups, target);
  if (is_fp32) return launch_weight_gradient_fp32(groups, gemm.accumulate, target);
  return launch_weight_gradient(groups, target);
}

} // namespace epx::moe::cuda::sm90
