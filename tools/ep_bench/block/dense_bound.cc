// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/dense_bound.h"

#include <algorithm>
#include <cstdint>

#include <cublas_v2.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include "tools/ep_bench/block/kernels.h"
#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw RuntimeError(fmt::format("{}: status {}", call, static_cast<int>(status)));
}

} // namespace

// cuBLAS is loaded when it is needed, so that ep_bench starts without it.
struct DenseBound::Library {
  Library() {
    const std::string name = fmt::format("libcublas.so.{}", CUBLAS_VER_MAJOR);
    handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) throw RuntimeError(fmt::format("--block needs cuBLAS for its dense bound: {}", dlerror()));
    load(create, "cublasCreate_v2");
    load(destroy, "cublasDestroy_v2");
    load(set_stream, "cublasSetStream_v2");
    load(gemm, "cublasGemmEx");
  }
  ~Library() {
    if (cublas != nullptr) destroy(cublas);
    // The library stays loaded: it may have threads and state of its own.
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  // cublasGemmEx is overloaded in C++.
  cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void* alpha,
                         const void* a, cudaDataType, int lda, const void* b, cudaDataType, int ldb, const void* beta,
                         void* c, cudaDataType, int ldc, cublasComputeType_t, cublasGemmAlgo_t) = nullptr;
  cublasHandle_t cublas = nullptr;

private:
  template <typename Function>
  void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    if (function == nullptr) throw RuntimeError(fmt::format("cuBLAS has no function {}", name));
  }

  void* handle_ = nullptr;
};

DenseBound::DenseBound(const Options& options, Gpu& gpu)
    : options_(options), library_(new Library), N_(int64_t{options.tokens} * options.top_k), H_(options.hidden),
      F_(options.block.ffn) {
  check_cublas(library_->create(&library_->cublas), "cublasCreate");
  check_cublas(library_->set_stream(library_->cublas, gpu.cuda_stream()), "cublasSetStream");
  uint32_t part = 0;
  const auto random = [&](int64_t elements) {
    Buffer buffer = Buffer::plain(gpu, static_cast<size_t>(epx::row_bytes(options.dtype, elements)));
    const BlockStream stream(options.seed, BlockTensor::Tokens, ~part++);
    check_cuda(launch_fill(buffer.data(), elements, stream, 1, options.dtype == EPX_BFLOAT16, gpu.cuda_stream()),
               "launch of fill");
    return buffer;
  };
  hidden_ = random(N_ * H_);
  wide_ = random(N_ * 2 * F_);
  inner_ = random(N_ * F_);
  gate_up_ = random(2 * F_ * H_);
  down_ = random(H_ * F_);
  rows_ = random(N_ * std::max(H_, 2 * F_));
  grad_gate_up_ = random(2 * F_ * H_);
  grad_down_ = random(H_ * F_);
  gpu.finish();
}

DenseBound::~DenseBound() = default;

void DenseBound::forward() {
  multiply({N_, 2 * F_, H_, hidden_, false, gate_up_, true, rows_});
  multiply({N_, H_, F_, inner_, false, down_, true, rows_});
}

void DenseBound::backward() {
  multiply({N_, F_, H_, hidden_, false, down_, false, rows_});
  multiply({N_, H_, 2 * F_, wide_, false, gate_up_, false, rows_});
  multiply({H_, F_, N_, hidden_, true, inner_, false, grad_down_});
  multiply({2 * F_, H_, N_, wide_, true, hidden_, false, grad_gate_up_});
}

void DenseBound::multiply(const Product& product) {
  const cudaDataType_t type = options_.dtype == EPX_BFLOAT16 ? CUDA_R_16BF : CUDA_R_32F;
  const float one = 1, zero = 0;
  // cuBLAS is column-major: it computes the transpose, d^T [n, m] = b^T * a^T.
  const auto m = static_cast<int>(product.m), n = static_cast<int>(product.n), k = static_cast<int>(product.k);
  check_cublas(library_->gemm(library_->cublas, product.b_is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                              product.a_is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, product.b.data(), type,
                              product.b_is_transposed ? k : n, product.a.data(), type, product.a_is_transposed ? m : k,
                              &zero, product.d.data(), type, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "cublasGemmEx");
}

} // namespace epx::bench
