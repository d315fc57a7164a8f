// SPDX-License-Identifier: Apache-2.0
// Matrix products of the FFN: Eigen, compiled once per instruction set and chosen at run time. All matrices are row-major.
// Equal shapes give equal bits, and the bits of a row of the first two do not depend on which row it is or on the others, as
// long as the number of rows is the same: callers work in tiles of kTileRows rows.
#pragma once

#include <cstdint>
#include <span>

namespace epx::moe {

inline constexpr int64_t kTileRows = 32;

template <typename T>
struct GemmKernels {
  // out[kTileRows, n] += a[kTileRows, k] * b[n, k]^T
  void (*add_a_bt)(const T* a, const T* b, T* out, int64_t n, int64_t k);
  // out[kTileRows, n] += a[kTileRows, k] * b[k, n]
  void (*add_a_b)(const T* a, const T* b, T* out, int64_t n, int64_t k);
  // out[m, n] += a[kTileRows, m]^T * b[kTileRows, n]
  void (*add_at_b)(const T* a, const T* b, T* out, int64_t m, int64_t n);
};

// The best for the processor that this runs on.
template <typename T>
const GemmKernels<T>& gemm();

// All that this processor has, the best last; for tests.
struct GemmIsa {
  const char* name;
  const GemmKernels<float>* float32;
  const GemmKernels<double>* float64;
};
std::span<const GemmIsa> supported_gemm_isas();

} // namespace epx::moe
