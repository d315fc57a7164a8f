// SPDX-License-Identifier: Apache-2.0
// The instances of CUTLASS's grouped GEMM that there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "moe/cuda/launch_target.h"

namespace epx::moe::cuda::sm90 {

// The products of the experts as CUTLASS wants them: arrays in device memory.
struct Groups {
  int num_groups = 0;
  const void** a = nullptr; // [num_groups]; so are the next five
  const void** b = nullptr;
  void** d = nullptr;
  int64_t* a_strides = nullptr; // elements from row to row, in memory
  int64_t* b_strides = nullptr;
  int64_t* d_strides = nullptr;
  int32_t* sizes = nullptr;   // [num_groups, 3]: m, n, k
  void* tensormaps = nullptr; // what the kernel makes of the groups for TMA, for each SM
  size_t tensormaps_bytes = 0;
};

// The instances. Without `accumulate` they do not read d, which is BFLOAT16 but for the last one.
cudaError_t launch_rows_by_weight(const Groups& groups, const LaunchTarget& target);
cudaError_t launch_rows_by_transposed_weight(const Groups& groups, bool accumulate, const LaunchTarget& target);
cudaError_t launch_weight_gradient(const Groups& groups, const LaunchTarget& target);
cudaError_t launch_weight_gradient_fp32(const Groups& groups, bool accumulate, const LaunchTarget& target);
std::vector<const void*> instance_kernels();

// Throws, since CUTLASS needs more memory for its tensormaps than there is.
[[noreturn]] void refuse_tensormaps(size_t bytes, size_t available_bytes);

} // namespace epx::moe::cuda::sm90
