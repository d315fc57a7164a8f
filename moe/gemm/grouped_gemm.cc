// SPDX-License-Identifier: Apache-2.0
// Which kernels multiply.
#include "moe/gemm/grouped_gemm.h"

#include "moe/gemm/generic_gemm.h"

#if defined(EPX_WITH_CUTLASS)
#include "base/cuda_error.h"
#include "moe/gemm/sm90/instances.h"
#include "moe/gemm/sm90/sm90_gemm.h"
#endif

namespace epx::moe::cuda {

#if defined(EPX_WITH_CUTLASS)
namespace {

// Sets *is_sm90 to whether the current device has wgmma. Its successors have other instructions in its place.
cudaError_t find_sm90(bool* is_sm90) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  *is_sm90 = major == 9 && minor == 0;
  return error;
}

} // namespace

void sm90::refuse_tensormaps(size_t bytes, size_t available_bytes) {
  fail(EPX_ERROR_INTERNAL, "a grouped GEMM of CUTLASS needs {} bytes for its tensormaps; the workspace has {}", bytes,
       available_bytes);
}
#endif

std::vector<const void*> grouped_gemm_kernels(epx_dtype in_dtype) {
  std::vector<const void*> kernels = generic_gemm_kernels(in_dtype);
#if defined(EPX_WITH_CUTLASS)
  bool is_sm90 = false;
  check_cuda(find_sm90(&is_sm90), "cudaDeviceGetAttribute");
  if (is_sm90 && (in_dtype == EPX_BFLOAT16 || in_dtype == EPX_FLOAT8_E4M3))
    for (const void* kernel : sm90::gemm_kernels(in_dtype))
      kernels.push_back(kernel);
#endif
  return kernels;
}

namespace {

// Returns whether the table of Product has it.
bool is_known(const GroupedGemm& gemm) {
  const bool is_fp8 = gemm.in_dtype == EPX_FLOAT8_E4M3;
  const bool is_as_a = gemm.out_dtype == (is_fp8 ? EPX_BFLOAT16 : gemm.in_dtype);
  switch (gemm.product) {
  case Product::kRowsByWeight:
    return is_as_a && !gemm.accumulate;
  case Product::kRowsByTransposedWeight:
    return is_as_a && !is_fp8;
  case Product::kWeightGradient:
    break;
  }
  return gemm.out_dtype == EPX_FLOAT32 || (is_as_a && !gemm.accumulate);
}

} // namespace

cudaError_t launch_grouped_gemm(const GroupedGemm& gemm, const LaunchTarget& target) {
  if (!is_known(gemm)) return cudaErrorInvalidValue;
  if (gemm.zones.num_experts == 0 || gemm.n == 0) return cudaSuccess;
#if defined(EPX_WITH_CUTLASS)
  if (gemm.tensor_core_workspace != nullptr) {
    bool is_sm90 = false;
    if (const cudaError_t error = find_sm90(&is_sm90); error != cudaSuccess) return error;
    if (is_sm90) return sm90::launch_gemm(gemm, target);
  }
#endif
  return launch_generic_gemm(gemm, target);
}

} // namespace epx::moe::cuda
