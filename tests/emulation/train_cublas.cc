// SPDX-License-Identifier: Apache-2.0
// The functions of cuBLAS that train_moe uses, on a CPU.
#include "apps/train_moe/cuda/cublas.h"

#include <cstddef>

#include "tests/emulation/streams.h"

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace train::cuda {
namespace {

// An element of op(matrix), which is column-major.
float element(const float* matrix, cublasOperation_t operation, int leading, int row, int column) {
  const int i = operation == CUBLAS_OP_N ? row : column;
  const int j = operation == CUBLAS_OP_N ? column : row;
  return matrix[i + static_cast<ptrdiff_t>(j) * leading];
}

cublasStatus_t sgemm(cublasHandle_t handle, cublasOperation_t a_operation, cublasOperation_t b_operation, int m, int n,
                     int k, const float* alpha, const float* a, int lda, const float* b, int ldb, const float* beta,
                     float* c, int ldc) {
  // As cuBLAS checks them.
  if (m < 0 || n < 0 || k < 0 || lda < (a_operation == CUBLAS_OP_N ? m : k) || ldb < (b_operation == CUBLAS_OP_N ? k : n) ||
      ldc < m)
    return CUBLAS_STATUS_INVALID_VALUE;
  epx::emulation::enqueue(handle->stream, [=, by = *alpha, keep = *beta] {
    for (int column = 0; column < n; ++column) {
      for (int row = 0; row < m; ++row) {
        double sum = 0;
        for (int i = 0; i < k; ++i)
          sum += static_cast<double>(element(a, a_operation, lda, row, i)) * element(b, b_operation, ldb, i, column);
        float& result = c[row + static_cast<ptrdiff_t>(column) * ldc];
        result = static_cast<float>(by * sum) + (keep != 0 ? keep * result : 0); // with 0, what was there is not read
      }
    }
  });
  return CUBLAS_STATUS_SUCCESS;
}

} // namespace

Cublas load_cublas() {
  return {.create =
              [](cublasHandle_t* handle) {
                *handle = new cublasContext;
                return CUBLAS_STATUS_SUCCESS;
              },
          .destroy =
              [](cublasHandle_t handle) {
                delete handle;
                return CUBLAS_STATUS_SUCCESS;
              },
          .set_stream =
              [](cublasHandle_t handle, cudaStream_t stream) {
                handle->stream = stream;
                return CUBLAS_STATUS_SUCCESS;
              },
          .set_math_mode = [](cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; },
          .sgemm = sgemm,
          .status_string = [](cublasStatus_t) { return "error of the emulation"; }};
}

} // namespace train::cuda
