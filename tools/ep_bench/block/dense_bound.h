// SPDX-License-Identifier: Apache-2.0
// The dense bound of a block: one cuBLAS product for each grouped product of the experts, of T * K rows. No kernel that
// multiplies for each expert apart can be expected to be faster.
#pragma once

#include <cstdint>
#include <memory>

#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

class DenseBound {
public:
  // Loads cuBLAS and allocates random operands. Throws RuntimeError.
  DenseBound(const Options& options, Gpu& gpu);
  ~DenseBound();

  void forward();
  void backward();

private:
  struct Library;
  // A product of row-major matrices, d [m, n], over k.
  struct Product {
    int64_t m, n, k;
    const Buffer& a; // [m, k], or [k, m] where it is transposed
    bool a_is_transposed;
    const Buffer& b; // [k, n], or [n, k] where it is transposed
    bool b_is_transposed;
    const Buffer& d;
  };

  void multiply(const Product& product);

  Options options_;
  std::unique_ptr<Library> library_;
  int64_t N_, H_, F_;
  Buffer hidden_, wide_, inner_;    // [N, H], [N, 2F], [N, F]
  Buffer gate_up_, down_;           // [2F, H], [H, F]
  Buffer rows_;                     // [N, H], [N, 2F] or [N, F]: results
  Buffer grad_gate_up_, grad_down_; // [2F, H], [H, F]
};

} // namespace epx::bench
