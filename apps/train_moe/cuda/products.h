// SPDX-License-Identifier: Apache-2.0
// Products of row-major float matrices, by cuBLAS.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "apps/train_moe/cuda/cublas.h"

namespace train::cuda {

struct Operand {
  const float* data;
  bool is_transposed; // what is in memory is the transpose of the factor
};

class Products {
public:
  // Products are enqueued on the stream, which must outlive this. Throws Error.
  explicit Products(cudaStream_t stream);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // c[m, n] = a[m, k] b[k, n], or, with `adds`, that is added to c. Throws Error.
  void multiply(const Operand& a, const Operand& b, int64_t m, int64_t n, int64_t k, float* c, bool adds);

private:
  void require(cublasStatus_t status, const char* function) const;

  Cublas cublas_;
  cublasHandle_t handle_ = nullptr;
};

} // namespace train::cuda
