// A matrix product that fills the GPU, as the computation beside the exchange in a training job does. It waits for nobody.
#pragma once

#include <cuda_runtime_api.h>

namespace epx::test {

constexpr int kMatrixSize = 2048; // rows and columns

// product = left * right, square matrices of kMatrixSize. Asynchronous on the stream; all pointers are to device memory.
cudaError_t multiply_matrices(const float* left, const float* right, float* product, cudaStream_t stream);

} // namespace epx::test
