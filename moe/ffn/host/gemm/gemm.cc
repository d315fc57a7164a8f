// SPDX-License-Identifier: Apache-2.0
#include "moe/ffn/host/gemm/gemm.h"

#include <vector>

namespace epx::moe {

#define EPX_DECLARE_GEMM(isa)                                                                                              \
  namespace isa {                                                                                                          \
  extern const GemmKernels<float> kFloat32;                                                                                \
  extern const GemmKernels<double> kFloat64;                                                                               \
  }
EPX_DECLARE_GEMM(portable)
#if defined(EPX_GEMM_AVX2)
EPX_DECLARE_GEMM(avx2)
#endif
#if defined(EPX_GEMM_AVX512)
EPX_DECLARE_GEMM(avx512)
#endif
#undef EPX_DECLARE_GEMM

namespace {

std::vector<GemmIsa> find_supported() {
  std::vector<GemmIsa> isas = {{"portable", &portable::kFloat32, &portable::kFloat64}};
#if defined(EPX_GEMM_AVX2)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) isas.push_back({"avx2", &avx2::kFloat32, &avx2::kFloat64});
#endif
#if defined(EPX_GEMM_AVX512)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512) isas.push_back({"avx512", &avx512::kFloat32, &avx512::kFloat64});
#endif
  return isas;
}

} // namespace

std::span<const GemmIsa> supported_gemm_isas() {
  static const std::vector<GemmIsa> isas = find_supported();
  return isas;
}

template <>
const GemmKernels<float>& gemm<float>() {
  return *supported_gemm_isas().back().float32;
}

template <>
const GemmKernels<double>& gemm<double>() {
  return *supported_gemm_isas().back().float64;
}

} // namespace epx::moe
