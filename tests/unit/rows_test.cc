// SPDX-License-Identifier: Apache-2.0
// The row arithmetic of every instruction set is compared with the oracle's scalar conversions, bit for bit.
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/dtypes.h"
#include "runtime/reference/reference.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/rows.h"

namespace {

using epx::reference::Matrix;
using epx::rows::RowKernels;

constexpr epx_dtype kDtypes[] = {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16};

Matrix make_matrix(epx_dtype dtype, int64_t rows, int64_t cols) {
  return {dtype, rows, cols, std::vector<std::byte>(static_cast<size_t>(rows * epx::row_bytes(dtype, cols)))};
}

// Returns elements of every magnitude, as random bit patterns.
Matrix random_bits(epx_dtype dtype, int64_t rows, int64_t cols, uint64_t seed) {
  Matrix matrix = make_matrix(dtype, rows, cols);
  std::mt19937_64 random(seed);
  for (std::byte& byte : matrix.bytes)
    byte = static_cast<std::byte>(random() & 0xff);
  return matrix;
}

const std::byte* row(const Matrix& matrix, int64_t index) {
  return matrix.bytes.data() + index * epx::row_bytes(matrix.dtype, matrix.cols);
}

Matrix expected_sum(const Matrix& rows, const float* weights) {
  Matrix out = make_matrix(rows.dtype, 1, rows.cols);
  for (int64_t c = 0; c < rows.cols; ++c) {
    float acc = 0.0f;
    for (int64_t r = 0; r < rows.rows; ++r) {
      const float x = epx::reference::load(rows, r, c);
      acc = weights != nullptr ? std::fma(weights[r], x, acc) : acc + x;
    }
    epx::reference::store(out, 0, c, acc);
  }
  return out;
}

Matrix weighted_sum(const RowKernels& kernels, const Matrix& rows, const float* weights) {
  Matrix out = random_bits(rows.dtype, 1, rows.cols, 99);
  std::vector<const std::byte*> pointers;
  for (int64_t r = 0; r < rows.rows; ++r)
    pointers.push_back(row(rows, r));
  kernels.weighted_sum(rows.dtype, out.bytes.data(), rows.dtype, pointers.data(), weights, static_cast<int>(rows.rows),
                       rows.cols);
  return out;
}

} // namespace

TEST_CASE("weighted_sum has the oracle's bits on every instruction set") {
  const float weights[] = {0.3f, -1.75f, 1e-30f, 3e4f};
  for (int index = 0; index < epx::rows::num_row_kernels(); ++index) {
    const RowKernels& kernels = epx::rows::row_kernels(index);
    for (const epx_dtype dtype : kDtypes) {
      for (const int64_t cols : {1, 7, 63, 64, 65, 300}) {
        for (const int64_t num_rows : {0, 1, 2, 4}) {
          CAPTURE(kernels.instruction_set);
          CAPTURE(dtype);
          CAPTURE(cols);
          CAPTURE(num_rows);
          const Matrix rows = random_bits(dtype, num_rows, cols, static_cast<uint64_t>(cols * 10 + num_rows));
          CHECK(epx::reference::count_wrong(expected_sum(rows, weights), weighted_sum(kernels, rows, weights), true) == 0);
          CHECK(epx::reference::count_wrong(expected_sum(rows, nullptr), weighted_sum(kernels, rows, nullptr), true) == 0);
        }
      }
    }
  }
}

TEST_CASE("every 16-bit pattern survives load and store") {
  for (int index = 0; index < epx::rows::num_row_kernels(); ++index) {
    const RowKernels& kernels = epx::rows::row_kernels(index);
    for (const epx_dtype dtype : {EPX_FLOAT16, EPX_BFLOAT16}) {
      CAPTURE(kernels.instruction_set);
      CAPTURE(dtype);
      Matrix all = make_matrix(dtype, 1, 65536);
      for (int pattern = 0; pattern < 65536; ++pattern) {
        const auto bits = static_cast<uint16_t>(pattern);
        std::memcpy(all.bytes.data() + 2 * pattern, &bits, sizeof(bits));
      }
      Matrix out = make_matrix(dtype, 1, 65536);
      kernels.scale(dtype, out.bytes.data(), all.bytes.data(), 1.0f, all.cols);
      CHECK(epx::reference::count_wrong(all, out, true) == 0);
    }
  }
}

TEST_CASE("scale rounds the float32 product to the dtype") {
  for (int index = 0; index < epx::rows::num_row_kernels(); ++index) {
    const RowKernels& kernels = epx::rows::row_kernels(index);
    for (const epx_dtype dtype : kDtypes) {
      for (const float weight : {0.1f, -3.0f, 1e-6f, 1e5f, 0.0f}) {
        CAPTURE(kernels.instruction_set);
        CAPTURE(dtype);
        CAPTURE(weight);
        const Matrix in = random_bits(dtype, 1, 5000, 7);
        Matrix expected = make_matrix(dtype, 1, in.cols);
        for (int64_t c = 0; c < in.cols; ++c)
          epx::reference::store(expected, 0, c, weight * epx::reference::load(in, 0, c));
        Matrix in_place = in;
        kernels.scale(dtype, in_place.bytes.data(), in_place.bytes.data(), weight, in.cols);
        CHECK(epx::reference::count_wrong(expected, in_place, true) == 0);
      }
    }
  }
}

TEST_CASE("dot adds in the order of the contract") {
  for (int index = 0; index < epx::rows::num_row_kernels(); ++index) {
    const RowKernels& kernels = epx::rows::row_kernels(index);
    for (const int64_t cols : {1, 255, 256, 257, 1000}) {
      CAPTURE(kernels.instruction_set);
      CAPTURE(cols);
      std::mt19937 random(static_cast<uint32_t>(cols));
      std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
      Matrix a = make_matrix(EPX_FLOAT32, 1, cols);
      Matrix b = make_matrix(EPX_FLOAT32, 1, cols);
      std::vector<float> acc(256, 0.0f);
      for (int64_t c = 0; c < cols; ++c) {
        const float x = uniform(random) * std::pow(10.0f, static_cast<float>(c % 9));
        const float y = uniform(random);
        epx::reference::store(a, 0, c, x);
        epx::reference::store(b, 0, c, y);
        acc[static_cast<size_t>(c % 256)] = std::fma(x, y, acc[static_cast<size_t>(c % 256)]);
      }
      while (acc.size() > 1) {
        for (size_t i = 0; i < acc.size() / 2; ++i)
          acc[i] = acc[2 * i] + acc[2 * i + 1];
        acc.resize(acc.size() / 2);
      }
      CHECK(kernels.dot(EPX_FLOAT32, row(a, 0), EPX_FLOAT32, row(b, 0), cols) == acc[0]);
    }
  }
}

TEST_CASE("the stages' float environment undoes the application's") {
  std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
  const unsigned int before = _mm_getcsr();
  _mm_setcsr(before | 0x8040); // flush to zero, denormals are zero
#endif
  Matrix tiny = make_matrix(EPX_BFLOAT16, 1, 64);
  for (size_t i = 0; i < tiny.bytes.size(); i += 2)
    tiny.bytes[i] = std::byte{0x02}; // 2 * 2^-133
  Matrix out = make_matrix(EPX_BFLOAT16, 1, 64);
  {
    const epx::host::DefaultFloatEnvironment environment;
    CHECK(std::fegetround() == FE_TONEAREST);
    epx::rows::row_kernels().scale(EPX_BFLOAT16, out.bytes.data(), tiny.bytes.data(), 0.5f, 64);
  }
  CHECK(std::fegetround() == FE_UPWARD);
#if defined(__x86_64__)
  CHECK((_mm_getcsr() & 0x8040u) == 0x8040u);
  _mm_setcsr(before);
#endif
  std::fesetround(FE_TONEAREST);
  CHECK(out.bytes[0] == std::byte{0x01});
}
