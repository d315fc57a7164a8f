// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/cuda/products.h"

#include <limits>

#include "apps/train_moe/errors.h"

namespace train::cuda {
namespace {

int as_int(int64_t size) {
  if (size > std::numeric_limits<int>::max())
    fail(kExitFailure, "a matrix with {} rows or columns is more than cuBLAS's int can count", size);
  return static_cast<int>(size);
}

} // namespace

Products::Products(cudaStream_t stream) : cublas_(load_cublas()) {
  require(cublas_.create(&handle_), "cublasCreate");
  require(cublas_.set_stream(handle_, stream), "cublasSetStream");
  require(cublas_.set_math_mode(handle_, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode"); // float32, never TF32
}

Products::~Products() {
  cublas_.destroy(handle_);
}

// cuBLAS takes matrices as column-major, in which ours are their transposes: it computes c^T = b^T a^T.
void Products::multiply(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, float* c, bool adds) {
  const auto operation = [](const Operand& operand) { return operand.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const float one = 1, beta = adds ? 1.0f : 0.0f;
  require(cublas_.sgemm(handle_, operation(b), operation(a), as_int(n), as_int(m), as_int(k), &one, b.data,
                        as_int(b.is_transposed ? k : n), a.data, as_int(a.is_transposed ? m : k), &beta, c, as_int(n)),
          "cublasSgemm");
}

void Products::require(cublasStatus_t status, const char* function) const {
  if (status != CUBLAS_STATUS_SUCCESS) fail(kExitFailure, "{}: {}", function, cublas_.status_string(status));
}

} // namespace train::cuda
