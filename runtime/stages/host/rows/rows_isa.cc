// SPDX-License-Identifier: Apache-2.0
// This file is compiled once per instruction set, with EPX_ROWS_ISA set to its name. It includes nothing whose inline functions
// could be merged with those of other files: the linker might keep the copy that old processors cannot run.
#include "runtime/stages/host/rows/rows.h"

namespace epx::rows {
namespace {

constexpr int kBlock = 64; // columns whose accumulators stay in registers

template <typename To, typename From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

struct Float32 {
  using Bits = uint32_t;
  static float load(Bits x) { return bits<float>(x); }
  static Bits store(float x) { return bits<uint32_t>(x); }
};

struct BFloat16 {
  using Bits = uint16_t;
  static float load(Bits x) { return bits<float>(static_cast<uint32_t>(x) << 16); }
  static Bits store(float x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint32_t rounded = u + 0x7fff + (u >> 16 & 1);
    const uint32_t quiet_nan = u | 0x400000;
    const uint32_t upper = (u & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded;
    return static_cast<Bits>(upper >> 16);
  }
};

// Float16 has no branches, so that loops over it vectorise.
struct Float16 {
  using Bits = uint16_t;
  static float load(Bits x) {
    const uint32_t magnitude = x & 0x7fffu;
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    // Moves the exponent from bias 15 to bias 127 by an exact multiplication, which is right for subnormals too.
    const uint32_t finite = bits<uint32_t>(bits<float>(magnitude << 13) * 0x1p112f);
    const uint32_t special = magnitude << 13 | 0x7f800000; // infinity, NaN
    return bits<float>(sign | (magnitude >= 0x7c00 ? special : finite));
  }
  static Bits store(float x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint32_t sign = u >> 16 & 0x8000;
    const uint32_t magnitude = u & 0x7fffffff;
    // A normal result rebiases the exponent and rounds to nearest even on the 13 bits that are cut. Overflow carries into
    // infinity.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // For a subnormal result, adding 0.5 makes the float adder shift and round; its last place is then 2^-24.
    const uint32_t subnormal = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - bits<uint32_t>(0.5f);
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= (143u << 23) ? special : result;
    return static_cast<Bits>(sign | result);
  }
};

template <typename Format, bool kWeighted>
inline void accumulate(float* acc, const typename Format::Bits* x, float weight, int count) {
  for (int i = 0; i < count; ++i) {
    if constexpr (kWeighted)
      acc[i] = __builtin_fmaf(weight, Format::load(x[i]), acc[i]);
    else
      acc[i] = acc[i] + Format::load(x[i]);
  }
}

// Adds the rows' columns from `column` on to acc[i].
template <typename Format, bool kWeighted>
inline void accumulate_rows(float* acc, const std::byte* const* rows, const float* weights, int num_rows, int64_t column,
                            int count) {
  for (int row = 0; row < num_rows; ++row) {
    const auto* x = reinterpret_cast<const typename Format::Bits*>(rows[row]) + column;
    accumulate<Format, kWeighted>(acc, x, kWeighted ? weights[row] : 1.0f, count);
  }
}

template <typename Format, bool kWeighted>
inline void sum_block(typename Format::Bits* out, const std::byte* const* rows, const float* weights, int num_rows,
                      int64_t column, int count) {
  float acc[kBlock] = {};
  accumulate_rows<Format, kWeighted>(acc, rows, weights, num_rows, column, count);
  for (int i = 0; i < count; ++i)
    out[i] = Format::store(acc[i]);
}

template <typename Format, bool kWeighted>
void sum_rows(std::byte* out, const std::byte* const* rows, const float* weights, int num_rows, int64_t cols) {
  auto* result = reinterpret_cast<typename Format::Bits*>(out);
  int64_t column = 0;
  for (; column + kBlock <= cols; column += kBlock) // a constant count lets the compiler keep acc in registers
    sum_block<Format, kWeighted>(result + column, rows, weights, num_rows, column, kBlock);
  if (column < cols)
    sum_block<Format, kWeighted>(result + column, rows, weights, num_rows, column, static_cast<int>(cols - column));
}

template <typename Format, bool kWeighted>
inline void sum_groups_block(typename Format::Bits* out, const std::byte* const* rows, const float* weights,
                             const int* group_sizes, int num_groups, int64_t column, int count) {
  float total[kBlock] = {};
  for (int group = 0; group < num_groups; ++group) {
    float acc[kBlock] = {};
    accumulate_rows<Format, kWeighted>(acc, rows, weights, group_sizes[group], column, count);
    for (int i = 0; i < count; ++i)
      total[i] = total[i] + Format::load(Format::store(acc[i]));
    rows += group_sizes[group];
    if constexpr (kWeighted) weights += group_sizes[group];
  }
  for (int i = 0; i < count; ++i)
    out[i] = Format::store(total[i]);
}

template <typename Format, bool kWeighted>
void sum_groups(std::byte* out, const std::byte* const* rows, const float* weights, const int* group_sizes, int num_groups,
                int64_t cols) {
  auto* result = reinterpret_cast<typename Format::Bits*>(out);
  int64_t column = 0;
  for (; column + kBlock <= cols; column += kBlock)
    sum_groups_block<Format, kWeighted>(result + column, rows, weights, group_sizes, num_groups, column, kBlock);
  if (column < cols)
    sum_groups_block<Format, kWeighted>(result + column, rows, weights, group_sizes, num_groups, column,
                                        static_cast<int>(cols - column));
}

template <typename Format>
void scale_row(std::byte* out, const std::byte* in, float weight, int64_t cols) {
  auto* result = reinterpret_cast<typename Format::Bits*>(out);
  const auto* x = reinterpret_cast<const typename Format::Bits*>(in);
  for (int64_t c = 0; c < cols; ++c)
    result[c] = Format::store(weight * Format::load(x[c]));
}

template <typename Format>
float dot_rows(const std::byte* a, const std::byte* b, int64_t cols) {
  constexpr int kAccumulators = 256;
  const auto* x = reinterpret_cast<const typename Format::Bits*>(a);
  const auto* y = reinterpret_cast<const typename Format::Bits*>(b);
  float acc[kAccumulators] = {};
  for (int64_t start = 0; start < cols; start += kAccumulators) {
    const int count = static_cast<int>(cols - start < kAccumulators ? cols - start : kAccumulators);
    for (int i = 0; i < count; ++i)
      acc[i] = __builtin_fmaf(Format::load(x[start + i]), Format::load(y[start + i]), acc[i]);
  }
  for (int64_t width = kAccumulators / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i)
      acc[i] = acc[2 * i] + acc[2 * i + 1];
  return acc[0];
}

// Calls body(Format{}) for the dtype.
template <typename Body>
inline auto with_format(epx_dtype dtype, Body body) {
  if (dtype == EPX_FLOAT32) return body(Float32{});
  if (dtype == EPX_FLOAT16) return body(Float16{});
  return body(BFloat16{});
}

void weighted_sum(epx_dtype dtype, std::byte* out, const std::byte* const* rows, const float* weights, int num_rows,
                  int64_t cols) {
  with_format(dtype, [&](auto format) {
    using Format = decltype(format);
    if (weights != nullptr)
      sum_rows<Format, true>(out, rows, weights, num_rows, cols);
    else
      sum_rows<Format, false>(out, rows, weights, num_rows, cols);
  });
}

void sum_of_groups(epx_dtype dtype, std::byte* out, const std::byte* const* rows, const float* weights,
                   const int* group_sizes, int num_groups, int64_t cols) {
  with_format(dtype, [&](auto format) {
    using Format = decltype(format);
    if (weights != nullptr)
      sum_groups<Format, true>(out, rows, weights, group_sizes, num_groups, cols);
    else
      sum_groups<Format, false>(out, rows, weights, group_sizes, num_groups, cols);
  });
}

void scale(epx_dtype dtype, std::byte* out, const std::byte* in, float weight, int64_t cols) {
  with_format(dtype, [&](auto format) { scale_row<decltype(format)>(out, in, weight, cols); });
}

float dot(epx_dtype dtype, const std::byte* a, const std::byte* b, int64_t cols) {
  return with_format(dtype, [&](auto format) { return dot_rows<decltype(format)>(a, b, cols); });
}

} // namespace

#define EPX_CONCAT_(a, b) a##b
#define EPX_CONCAT(a, b) EPX_CONCAT_(a, b)
#define EPX_QUOTE_(a) #a
#define EPX_QUOTE(a) EPX_QUOTE_(a)
extern const RowKernels EPX_CONCAT(kRows_, EPX_ROWS_ISA);
const RowKernels EPX_CONCAT(kRows_, EPX_ROWS_ISA) = {EPX_QUOTE(EPX_ROWS_ISA), weighted_sum, sum_of_groups, scale, dot};

} // namespace epx::rows
