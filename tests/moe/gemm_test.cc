// SPDX-License-Identifier: Apache-2.0
// These tests compare the matrix products of every instruction set that this processor has, and look at which products on a GPU
// take tensor cores.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "moe/ffn/host/gemm/gemm.h"
#include "moe/gemm/gemm_workspace.h"
#include "tests/support/rng.h"

namespace epx::test {
namespace {

using moe::GemmKernels;
using moe::kTileRows;

template <typename T>
std::vector<T> random_values(int64_t size, Rng& rng) {
  std::vector<T> values(size);
  for (T& value : values)
    value = static_cast<T>(static_cast<double>(rng.next() >> 11) * 0x1p-52 - 1);
  return values;
}

// Returns the largest difference of out from initial + sum over i < depth of term(row, column, i).
template <typename T, typename Term>
double error_of(const std::vector<T>& out, const std::vector<T>& initial, int64_t columns, int64_t depth, Term&& term) {
  double worst = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const auto row = static_cast<int64_t>(i) / columns;
    const auto column = static_cast<int64_t>(i) % columns;
    double expected = static_cast<double>(initial[i]);
    for (int64_t d = 0; d < depth; ++d)
      expected += term(row, column, d);
    worst = std::max(worst, std::abs(expected - static_cast<double>(out[i])));
  }
  return worst;
}

template <typename T>
void check_products(const GemmKernels<T>& kernels, int64_t n, int64_t k, double tolerance) {
  CAPTURE(n);
  CAPTURE(k);
  Rng rng(static_cast<uint64_t>(n * 1000 + k));
  const std::vector<T> a = random_values<T>(kTileRows * k, rng), b = random_values<T>(n * k, rng);
  const std::vector<T> initial = random_values<T>(kTileRows * n, rng);

  std::vector<T> out = initial;
  kernels.add_a_bt(a.data(), b.data(), out.data(), n, k);
  CHECK(error_of(out, initial, n, k, [&](int64_t r, int64_t c, int64_t d) {
          return static_cast<double>(a[r * k + d]) * static_cast<double>(b[c * k + d]);
        }) <= tolerance * static_cast<double>(k));

  // A row has the same bits in any place and beside any other rows.
  std::vector<T> rolled(a.size()), rolled_initial(initial.size());
  for (int64_t r = 0; r < kTileRows; ++r) {
    const int64_t to = (r + 5) % kTileRows;
    for (int64_t i = 0; i < k; ++i)
      rolled[to * k + i] = r % 3 == 0 ? a[r * k + i] : T{-7};
    for (int64_t i = 0; i < n; ++i)
      rolled_initial[to * n + i] = initial[r * n + i];
  }
  kernels.add_a_bt(rolled.data(), b.data(), rolled_initial.data(), n, k);
  for (int64_t r = 0; r < kTileRows; r += 3)
    CHECK(std::memcmp(&rolled_initial[(r + 5) % kTileRows * n], &out[r * n], n * sizeof(T)) == 0);

  out = initial;
  kernels.add_a_b(a.data(), b.data(), out.data(), n, k);
  CHECK(error_of(out, initial, n, k, [&](int64_t r, int64_t c, int64_t d) {
          return static_cast<double>(a[r * k + d]) * static_cast<double>(b[d * n + c]);
        }) <= tolerance * static_cast<double>(k));

  const std::vector<T> c = random_values<T>(kTileRows * n, rng), grad_initial = random_values<T>(k * n, rng);
  std::vector<T> grad = grad_initial;
  kernels.add_at_b(a.data(), c.data(), grad.data(), k, n);
  CHECK(error_of(grad, grad_initial, n, kTileRows, [&](int64_t row, int64_t column, int64_t d) {
          return static_cast<double>(a[d * k + row]) * static_cast<double>(c[d * n + column]);
        }) <= tolerance * static_cast<double>(kTileRows));
}

TEST_CASE("products of all instruction sets") {
  REQUIRE(moe::supported_gemm_isas().size() >= 1);
  for (const moe::GemmIsa& isa : moe::supported_gemm_isas()) {
    CAPTURE(std::string(isa.name));
    for (const int64_t n : {1, 2, 7, 32, 65, 200}) {
      for (const int64_t k : {1, 3, 16, 33, 300}) {
        check_products(*isa.float32, n, k, 1e-6);
        check_products(*isa.float64, n, k, 1e-15);
      }
    }
  }
}

TEST_CASE("tensor cores take rows of bfloat16 whose bytes are multiples of 16, and of E4M3 whole blocks") {
  using moe::fits_tensor_cores;
  CHECK(fits_tensor_cores(EPX_BFLOAT16, 4096, 1536, 100000));
  CHECK(fits_tensor_cores(EPX_BFLOAT16, 8, 8, 0));
  CHECK_FALSE(fits_tensor_cores(EPX_FLOAT16, 4096, 1536, 100000));
  CHECK_FALSE(fits_tensor_cores(EPX_FLOAT32, 4096, 1536, 100000));
  CHECK_FALSE(fits_tensor_cores(EPX_BFLOAT16, 4100, 1536, 100000));
  CHECK_FALSE(fits_tensor_cores(EPX_BFLOAT16, 4096, 1537, 100000));
  CHECK(fits_tensor_cores(EPX_BFLOAT16, 8, (int64_t{1} << 30) - 8, 1));
  CHECK_FALSE(fits_tensor_cores(EPX_BFLOAT16, 8, int64_t{1} << 30, 1)); // 2F is no int32
  CHECK_FALSE(fits_tensor_cores(EPX_BFLOAT16, 8, 8, int64_t{1} << 31));
  CHECK(fits_tensor_cores(EPX_FLOAT8_E4M3, 7168, 2048, 32768));
  CHECK_FALSE(fits_tensor_cores(EPX_FLOAT8_E4M3, 7168, 2048, 32767));
  CHECK_FALSE(fits_tensor_cores(EPX_FLOAT8_E4M3, 7184, 2048, 32768));
  CHECK_FALSE(fits_tensor_cores(EPX_FLOAT8_E4M3, 7168, 64, 32768));
}

TEST_CASE("the products' workspace has room for each expert and each SM") {
  CHECK(moe::tensor_core_workspace_bytes(0) == 0);
  CHECK(moe::tensor_core_workspace_bytes(1) == 144 * 5 * 128 + 256);
  CHECK(moe::tensor_core_workspace_bytes(32) == 144 * 5 * 128 + 2048); // 60 bytes of each
  CHECK(moe::tensor_core_workspace_bytes(4096) == 4096 * 2 * 128);     // two tensormaps of each
}

} // namespace
} // namespace epx::test
