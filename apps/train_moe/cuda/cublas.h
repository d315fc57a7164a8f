// SPDX-License-Identifier: Apache-2.0
// The functions of cuBLAS that train_moe uses. The library is loaded when a GPU is: linking it would cost every start, on the
// host too, 0.16 s (measured: its two files are 600 MB).
#pragma once

#include <cublas_v2.h>

namespace train::cuda {

struct Cublas {
  decltype(&cublasCreate_v2) create;
  decltype(&cublasDestroy_v2) destroy;
  decltype(&cublasSetStream_v2) set_stream;
  decltype(&cublasSetMathMode) set_math_mode;
  decltype(&cublasSgemm_v2) sgemm;
  decltype(&cublasGetStatusString) status_string;
};

// Throws Error when the library, or one of the functions, is not there.
Cublas load_cublas();

} // namespace train::cuda
