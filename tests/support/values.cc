// SPDX-License-Identifier: Apache-2.0
#include "tests/support/values.h"

#include <algorithm>
#include <cstring>

#include "base/dtypes.h"

namespace epx::test {

namespace {

struct Format {
  int bytes;
  int mantissa_bits;
  int exponent_bits;
};

Format format_of(epx_dtype dtype) {
  if (dtype == EPX_FLOAT16) return {2, 10, 5};
  if (dtype == EPX_BFLOAT16) return {2, 7, 8};
  return {4, 23, 8};
}

uint32_t assemble(Format format, uint32_t sign, uint32_t exponent, uint32_t mantissa) {
  return sign << (format.mantissa_bits + format.exponent_bits) | exponent << format.mantissa_bits | mantissa;
}

uint32_t plain_bits(Format format, uint64_t random) {
  const uint32_t bias = (1u << (format.exponent_bits - 1)) - 1;
  const auto exponent = static_cast<uint32_t>(bias - 5 + (random >> 40) % 11); // about 1/32 .. 32
  const auto mantissa = static_cast<uint32_t>(random) & ((1u << format.mantissa_bits) - 1);
  return assemble(format, static_cast<uint32_t>(random >> 63), exponent, mantissa);
}

uint32_t special_bits(Format format, Rng& rng) {
  const uint32_t all_ones = (1u << format.exponent_bits) - 1;
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
  const auto random = static_cast<uint32_t>(rng.next()) & mantissa_mask;
  const auto sign = static_cast<uint32_t>(rng.below(2));
  switch (rng.below(8)) {
  case 0:
    return assemble(format, sign, 0, 0); // zero
  case 1:
    return assemble(format, sign, 0, random | 1); // subnormal
  case 2:
    return assemble(format, sign, all_ones, 0); // infinity
  case 3:
    return assemble(format, sign, all_ones, random | 1); // NaN, quiet or signalling
  case 4:
    return assemble(format, sign, all_ones - 1, random); // close to overflow
  case 5:
    return assemble(format, sign, 1, random); // close to underflow
  default:
    return assemble(format, sign, static_cast<uint32_t>(rng.below(all_ones)), random); // any finite magnitude
  }
}

void set_bits(std::byte* to, Format format, uint32_t bits) {
  std::memcpy(to, &bits, static_cast<size_t>(format.bytes)); // little endian
}

void fill(std::byte* to, Format format, int64_t count, bool with_specials, Rng& rng) {
  for (int64_t i = 0; i < count; ++i, to += format.bytes) {
    const uint64_t random = rng.next();
    const bool special = with_specials && (random >> 56) % 8 == 0;
    const uint32_t bits = special ? special_bits(format, rng) : plain_bits(format, random);
    set_bits(to, format, bits);
  }
}

// A block that a quantiser may take for one, or for a part of one.
void fill_block(std::byte* to, Format format, int64_t count, Rng& rng) {
  const uint32_t all_ones = (1u << format.exponent_bits) - 1, bias = all_ones / 2;
  const uint32_t small = bias > 30 ? bias - 30 : 1, large = all_ones - 2;
  const auto kind = rng.below(7);
  const auto mantissa_of_all = static_cast<uint32_t>(rng.next()) & ((1u << format.mantissa_bits) - 1);
  if (kind > 4) return fill(to, format, count, kind == 5, rng);
  for (int64_t i = 0; i < count; ++i) {
    const auto sign = static_cast<uint32_t>(rng.below(2));
    const auto mantissa = static_cast<uint32_t>(rng.next()) & ((1u << format.mantissa_bits) - 1);
    const uint32_t exponents[] = {0, 0, bias, small, large};
    const uint32_t mantissas[] = {0, mantissa, mantissa_of_all, mantissa, mantissa};
    set_bits(to + i * format.bytes, format, assemble(format, sign, exponents[kind], mantissas[kind]));
  }
}

} // namespace

reference::Matrix random_blocks(epx_dtype dtype, int64_t rows, int64_t cols, Rng& rng) {
  constexpr int64_t kBlock = 16; // the smallest that a scaling has
  const Format format = format_of(dtype);
  reference::Matrix matrix = scribbled_rows(dtype, rows, cols);
  for (int64_t row = 0; row < rows; ++row) {
    std::byte* const to = matrix.bytes.data() + row * cols * format.bytes;
    if (rng.chance(50)) {
      fill(to, format, cols, false, rng);
      if (rng.chance(50)) { // what went before it may have been quantised already
        const uint32_t infinity = assemble(format, 0, (1u << format.exponent_bits) - 1, 0);
        set_bits(to + (cols - 1 - rng.below(std::min(kBlock, cols))) * format.bytes, format, infinity);
      }
      continue;
    }
    for (int64_t begin = 0; begin < cols; begin += kBlock)
      fill_block(to + begin * format.bytes, format, std::min(kBlock, cols - begin), rng);
  }
  return matrix;
}

reference::Matrix random_rows(epx_dtype dtype, int64_t rows, int64_t cols, Rng& rng) {
  if (is_quantised_dtype(dtype)) {
    reference::Matrix any = scribbled_rows(dtype, rows, cols);
    std::ranges::generate(any.bytes, [&] { return static_cast<std::byte>(rng.next()); });
    return any;
  }
  const Format format = format_of(dtype);
  reference::Matrix matrix = scribbled_rows(dtype, rows, cols);
  for (int64_t row = 0; row < rows; ++row) {
    fill(matrix.bytes.data() + row * cols * format.bytes, format, cols, rng.below(4) == 0, rng);
  }
  return matrix;
}

std::vector<float> random_weights(int64_t count, Rng& rng) {
  std::vector<float> weights(static_cast<size_t>(count));
  auto* to = reinterpret_cast<std::byte*>(weights.data());
  for (int64_t i = 0; i < count; ++i) {
    fill(to + i * static_cast<int64_t>(sizeof(float)), format_of(EPX_FLOAT32), 1, rng.below(4) == 0, rng);
  }
  return weights;
}

reference::Sidecar random_sidecar(int64_t rows, int64_t row_bytes, Rng& rng) {
  reference::Sidecar sidecar = scribbled_sidecar(rows, row_bytes);
  for (std::byte& value : sidecar.bytes)
    value = static_cast<std::byte>(rng.next());
  return sidecar;
}

reference::Matrix scribbled_rows(epx_dtype dtype, int64_t rows, int64_t cols) {
  const auto bytes = static_cast<size_t>(rows * row_bytes(dtype, cols));
  return {dtype, rows, cols, std::vector<std::byte>(bytes, kScribble)};
}

std::vector<float> scribbled_weights(int64_t count) {
  std::vector<float> weights(static_cast<size_t>(count));
  if (count > 0) std::memset(weights.data(), static_cast<int>(kScribble), weights.size() * sizeof(float));
  return weights;
}

reference::Sidecar scribbled_sidecar(int64_t rows, int64_t row_bytes) {
  return {row_bytes, std::vector<std::byte>(static_cast<size_t>(rows * row_bytes), kScribble)};
}

} // namespace epx::test
