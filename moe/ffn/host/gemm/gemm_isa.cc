// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set, with EPX_GEMM_ISA set to its name. Eigen's namespace is renamed, so that its inline
// functions are not merged with those of other instruction sets, which old processors could not run; nothing else of this file
// is inline across files (tests/install/check_isa_symbols.py).
#define EPX_GEMM_JOIN_(a, b) a##b
#define EPX_GEMM_JOIN(a, b) EPX_GEMM_JOIN_(a, b)
#define Eigen EPX_GEMM_JOIN(epx_eigen_, EPX_GEMM_ISA)
#define EIGEN_DONT_PARALLELIZE
#define EIGEN_MPL2_ONLY
#include <Eigen/Core>

#include "moe/ffn/host/gemm/gemm.h"

namespace epx::moe::EPX_GEMM_ISA {
namespace {

template <typename T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <typename T>
using In = Eigen::Map<const Matrix<T>>;
template <typename T>
using Out = Eigen::Map<Matrix<T>>;

template <typename T>
void add_a_bt(const T* a, const T* b, T* out, int64_t n, int64_t k) {
  Out<T>(out, kTileRows, n).noalias() += In<T>(a, kTileRows, k) * In<T>(b, n, k).transpose();
}

template <typename T>
void add_a_b(const T* a, const T* b, T* out, int64_t n, int64_t k) {
  Out<T>(out, kTileRows, n).noalias() += In<T>(a, kTileRows, k) * In<T>(b, k, n);
}

template <typename T>
void add_at_b(const T* a, const T* b, T* out, int64_t m, int64_t n) {
  Out<T>(out, m, n).noalias() += In<T>(a, kTileRows, m).transpose() * In<T>(b, kTileRows, n);
}

} // namespace

extern const GemmKernels<float> kFloat32;
extern const GemmKernels<double> kFloat64;
const GemmKernels<float> kFloat32{add_a_bt<float>, add_a_b<float>, add_at_b<float>};
const GemmKernels<double> kFloat64{add_a_bt<double>, add_a_b<double>, add_at_b<double>};

} // namespace epx::moe::EPX_GEMM_ISA
