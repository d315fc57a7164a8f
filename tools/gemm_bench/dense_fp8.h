// SPDX-License-Identifier: Apache-2.0
// A dense product of E4M3 by cuBLASLt, with scales of blocks as the grouped products have them.
#pragma once

#include <cstdint>
#include <memory>

#include <cuda_runtime_api.h>

namespace epx::bench {

// d[m, n] = the sum over k of a[m, k] * b[n, k], all by rows. a has a scale for each 128 elements of a row; b has one, too, or one
// for each 128 x 128 elements.
struct DenseFp8Operands {
  int64_t m, n, k;
  const void *a, *b; // FLOAT8_E4M3
  const float *a_scales, *b_scales;
  bool b_has_square_blocks;
  void* d;
  bool d_is_fp32; // else BFLOAT16
};

class DenseFp8 {
public:
  // Chooses the algorithm. Throws where cuBLASLt has none.
  explicit DenseFp8(const DenseFp8Operands& operands);
  ~DenseFp8();
  DenseFp8(const DenseFp8&) = delete;
  DenseFp8& operator=(const DenseFp8&) = delete;

  void enqueue(cudaStream_t stream) const;

private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace epx::bench
