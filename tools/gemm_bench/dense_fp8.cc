// SPDX-License-Identifier: Apache-2.0
#include "tools/gemm_bench/dense_fp8.h"

#include <stdexcept>

#include <cublasLt.h>
#include <fmt/format.h>

namespace epx::bench {
namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(fmt::format("{}: {}", what, cublasLtGetStatusString(status)));
}

template <typename T>
void set(cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(cublasLtMatmulDescSetAttribute(matmul, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
}
// The matrices of cuBLAS have columns where these have rows.
cublasLtMatrixLayout_t layout_of(cudaDataType type, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), columns),
        "cublasLtMatrixLayoutCreate");
  return layout;
}

} // namespace

struct DenseFp8::State {
  DenseFp8Operands operands;
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t matmul = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatmulHeuristicResult_t chosen{};
  void* workspace = nullptr;

  ~State() {
    cudaFree(workspace);
    if (preference != nullptr) cublasLtMatmulPreferenceDestroy(preference);
    for (cublasLtMatrixLayout_t layout : {a, b, d})
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    if (matmul != nullptr) cublasLtMatmulDescDestroy(matmul);
    if (handle != nullptr) cublasLtDestroy(handle);
  }
};

DenseFp8::DenseFp8(const DenseFp8Operands& operands) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.operands = operands;
  check(cublasLtCreate(&state.handle), "cublasLtCreate");
  check(cublasLtMatmulDescCreate(&state.matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  // It computes the transpose, n x m: its first operand is b.
  set(state.matmul, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(state.matmul, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(state.matmul, CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
      operands.b_has_square_blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
  set(state.matmul, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
  set(state.matmul, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.b_scales);
  set(state.matmul, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.a_scales);
  state.b = layout_of(CUDA_R_8F_E4M3, operands.n, operands.k);
  state.a = layout_of(CUDA_R_8F_E4M3, operands.m, operands.k);
  state.d = layout_of(operands.d_is_fp32 ? CUDA_R_32F : CUDA_R_16BF, operands.m, operands.n);
  if (cudaMalloc(&state.workspace, kWorkspaceBytes) != cudaSuccess) throw std::runtime_error("cudaMalloc");
  check(cublasLtMatmulPreferenceCreate(&state.preference), "cublasLtMatmulPreferenceCreate");
  check(cublasLtMatmulPreferenceSetAttribute(state.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes,
                                             sizeof(kWorkspaceBytes)),
        "cublasLtMatmulPreferenceSetAttribute");
  int found = 0;
  check(cublasLtMatmulAlgoGetHeuristic(state.handle, state.matmul, state.b, state.a, state.d, state.d, state.preference, 1,
                                       &state.chosen, &found),
        "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0) throw std::runtime_error("cuBLASLt has no product of E4M3 with these scales");
}

DenseFp8::~DenseFp8() = default;

void DenseFp8::enqueue(cudaStream_t stream) const {
  const State& state = *state_;
  const DenseFp8Operands& operands = state.operands;
  const float one = 1, zero = 0;
  check(cublasLtMatmul(state.handle, state.matmul, &one, operands.b, state.b, operands.a, state.a, &zero, operands.d,
                       state.d, operands.d, state.d, &state.chosen.algo, state.workspace, kWorkspaceBytes, stream),
        "cublasLtMatmul");
}

} // namespace epx::bench
