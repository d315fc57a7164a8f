// SPDX-License-Identifier: Apache-2.0
// The local kernels of the native way (--native): permutations of rows, and the sum of each token's rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "epx/epx.h"

namespace epx::bench {

// Rows are contiguous; their buffers are aligned to 16 bytes, and do not overlap.
struct PermuteParams {
  const std::byte* source;
  std::byte* target;
  const int32_t* index; // [rows]
  int64_t rows;
  int64_t row_bytes; // a multiple of 2
};
// Copies row index[i] of the source to row i of the target. No rows launch nothing, here and below.
cudaError_t launch_gather_rows(const PermuteParams& params, int num_sms, cudaStream_t stream);
// Copies row i of the source to row index[i] of the target; no two are the same.
cudaError_t launch_scatter_rows(const PermuteParams& params, int num_sms, cudaStream_t stream);

struct SumParams {
  const std::byte* source; // [*, H]
  const int32_t* index;    // [T, K] the row of each route
  const float* weights;    // [T, K]
  std::byte* out;          // [T, H]
  int64_t tokens;          // T
  int64_t hidden;          // H, elements
  int top_k;               // K
};
// Sums a token's rows times their weights in fp32, in the order of k, each step a fused multiply-add onto a sum that starts at
// +0, and rounds the sum once. `dtype` is a token dtype.
cudaError_t launch_sum_rows(const SumParams& params, epx_dtype dtype, int num_sms, cudaStream_t stream);

cudaError_t load_native_kernels();

} // namespace epx::bench
