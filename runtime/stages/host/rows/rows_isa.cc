// SPDX-License-Identifier: Apache-2.0
// This file is compiled once per instruction set, with EPX_ROWS_ISA set to its name. It includes nothing whose inline functions
// could be merged with those of other files: the linker might keep the copy that old processors cannot run.
#include "runtime/stages/host/rows/quantise_isa.h"
#include "runtime/stages/host/rows/row_types_isa.h"
#include "runtime/stages/host/rows/rows.h"

namespace epx::rows {
namespace {

constexpr int kBlock = 64; // columns whose accumulators stay in registers

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

template <typename OutFormat, typename Format, bool kWeighted>
inline void sum_block(typename OutFormat::Bits* out, const std::byte* const* rows, const float* weights, int num_rows,
                      int64_t column, int count) {
  float acc[kBlock] = {};
  accumulate_rows<Format, kWeighted>(acc, rows, weights, num_rows, column, count);
  for (int i = 0; i < count; ++i)
    out[i] = OutFormat::store(acc[i]);
}

template <typename OutFormat, typename Format, bool kWeighted>
void sum_rows(std::byte* out, const std::byte* const* rows, const float* weights, int num_rows, int64_t cols) {
  auto* result = reinterpret_cast<typename OutFormat::Bits*>(out);
  int64_t column = 0;
  for (; column + kBlock <= cols; column += kBlock) // a constant count lets the compiler keep acc in registers
    sum_block<OutFormat, Format, kWeighted>(result + column, rows, weights, num_rows, column, kBlock);
  if (column < cols)
    sum_block<OutFormat, Format, kWeighted>(result + column, rows, weights, num_rows, column,
                                            static_cast<int>(cols - column));
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

template <typename Format, typename OtherFormat>
float dot_rows(const std::byte* a, const std::byte* b, int64_t cols) {
  constexpr int kAccumulators = 256;
  const auto* x = reinterpret_cast<const typename Format::Bits*>(a);
  const auto* y = reinterpret_cast<const typename OtherFormat::Bits*>(b);
  float acc[kAccumulators] = {};
  for (int64_t start = 0; start < cols; start += kAccumulators) {
    const int count = static_cast<int>(cols - start < kAccumulators ? cols - start : kAccumulators);
    for (int i = 0; i < count; ++i)
      acc[i] = __builtin_fmaf(Format::load(x[start + i]), OtherFormat::load(y[start + i]), acc[i]);
  }
  for (int64_t width = kAccumulators / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i)
      acc[i] = acc[2 * i] + acc[2 * i + 1];
  return acc[0];
}

template <typename OutFormat, typename Format>
void weighted_sum_as(std::byte* out, const std::byte* const* rows, const float* weights, int num_rows, int64_t cols) {
  if (weights != nullptr)
    sum_rows<OutFormat, Format, true>(out, rows, weights, num_rows, cols);
  else
    sum_rows<OutFormat, Format, false>(out, rows, weights, num_rows, cols);
}

void weighted_sum(epx_dtype out_dtype, std::byte* out, epx_dtype dtype, const std::byte* const* rows, const float* weights,
                  int num_rows, int64_t cols) {
  with_format(dtype, [&](auto format) {
    using Format = decltype(format);
    if (out_dtype == dtype)
      weighted_sum_as<Format, Format>(out, rows, weights, num_rows, cols);
    else if (out_dtype == EPX_FLOAT32)
      weighted_sum_as<Float32, Format>(out, rows, weights, num_rows, cols);
    else
      with_format(out_dtype, [&](auto out_format) {
        weighted_sum_as<decltype(out_format), Float32>(out, rows, weights, num_rows, cols);
      });
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

float dot(epx_dtype a_dtype, const std::byte* a, epx_dtype b_dtype, const std::byte* b, int64_t cols) {
  return with_format(a_dtype, [&](auto format) {
    return with_format(b_dtype, [&](auto other) { return dot_rows<decltype(format), decltype(other)>(a, b, cols); });
  });
}

} // namespace

#define EPX_CONCAT_(a, b) a##b
#define EPX_CONCAT(a, b) EPX_CONCAT_(a, b)
#define EPX_QUOTE_(a) #a
#define EPX_QUOTE(a) EPX_QUOTE_(a)
extern const RowKernels EPX_CONCAT(kRows_, EPX_ROWS_ISA);
const RowKernels EPX_CONCAT(kRows_, EPX_ROWS_ISA) = {
    EPX_QUOTE(EPX_ROWS_ISA), weighted_sum, sum_of_groups, scale, dot, quantise, dequantise};

} // namespace epx::rows
