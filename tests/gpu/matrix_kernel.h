// A matrix product that fills the GPU: what computes beside the exchange in a training job. It waits for nobody.
#pragma once

#include <cuda_runtime_api.h>

namespace epx::test {

constexpr int kMatrixSize = 2048; // rows and columns

// product = left * right, square matrices of kMatrixSize. Asynchronous on the stream; pointers to device memory.
cudaError_t multiply_matrices(const float* left, const float* right, float* product, cudaStream_t stream);

} // namespace epx::test
