// SPDX-License-Identifier: Apache-2.0
// This matrix product fills the GPU, as the computation beside the exchange does in a training job. It waits for nobody.
#pragma once

#include <cuda_runtime_api.h>

namespace epx::test {

constexpr int kMatrixSize = 2048; // rows and columns

// product = left * right, square matrices of kMatrixSize. Asynchronous on the stream; all pointers are to device memory.
cudaError_t multiply_matrices(const float* left, const float* right, float* product, cudaStream_t stream);

} // namespace epx::test
