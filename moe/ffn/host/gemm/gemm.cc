#include "moe/ffn/host/gemm/gemm.h"

namespace epx::moe {

#define EPX_DECLARE_GEMM(isa)                                                                                              \
  namespace isa {                                                                                                          \
  extern const GemmKernels<float> kFloat32;                                                                                \
  extern const GemmKernels<double> kFloat64;                                                                               \
  }
EPX_DECLARE_GEMM(portable)
#if defined(EPX_GEMM_X86)
EPX_DECLARE_GEMM(avx2)
EPX_DECLARE_GEMM(avx512)
#endif
#undef EPX_DECLARE_GEMM

namespace {

struct Kernels {
  const GemmKernels<float>* float32;
  const GemmKernels<double>* float64;
};

Kernels choose() {
#if defined(EPX_GEMM_X86)
  if (__builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0)
    return {&avx512::kFloat32, &avx512::kFloat64};
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0) return {&avx2::kFloat32, &avx2::kFloat64};
#endif
  return {&portable::kFloat32, &portable::kFloat64};
}

const Kernels& chosen() {
  static const Kernels kernels = choose();
  return kernels;
}

} // namespace

template <>
const GemmKernels<float>& gemm<float>() {
  return *chosen().float32;
}

template <>
const GemmKernels<double>& gemm<double>() {
  return *chosen().float64;
}

} // namespace epx::moe
