// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/host/rows/rows.h"

#if defined(EPX_ROWS_X86)
#include <cpuid.h>
#endif

namespace epx::rows {

extern const RowKernels kRows_portable;
#if defined(EPX_ROWS_X86)
extern const RowKernels kRows_avx2;
extern const RowKernels kRows_avx512;

namespace {

bool has_f16c() { // which not all compilers' __builtin_cpu_supports() knows
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

} // namespace
#endif

int num_row_kernels() {
#if defined(EPX_ROWS_X86)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return 3;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return 2;
#endif
  return 1;
}

const RowKernels& row_kernels(int index) {
#if defined(EPX_ROWS_X86)
  if (index == 2) return kRows_avx512;
  if (index == 1) return kRows_avx2;
#endif
  static_cast<void>(index);
  return kRows_portable;
}

const RowKernels& row_kernels() {
  static const RowKernels& kBest = row_kernels(num_row_kernels() - 1);
  return kBest;
}

} // namespace epx::rows
