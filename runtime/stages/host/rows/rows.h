// SPDX-License-Identifier: Apache-2.0
// These functions compute on rows of float32, float16 or bfloat16 with the contract's rounding: to nearest even, overflow to
// infinity, subnormals kept, and every product and sum an explicit fma or addition in float32. They quantise such rows, too.
//
// The same source is compiled for several instruction sets; all give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx.h"
#include "runtime/formats/row_format.h"

namespace epx::rows {

struct RowKernels {
  const char* instruction_set;

  // out[c] = round(sum over i < num_rows of weights[i] * rows[i][c]), each step acc = fma(w, x, acc) from +0; without
  // weights acc + x. num_rows may be 0. out overlaps no row. One of the dtypes is FLOAT32, or both are the same.
  void (*weighted_sum)(epx_dtype out_dtype, std::byte* out, epx_dtype dtype, const std::byte* const* rows,
                       const float* weights, int num_rows, int64_t cols);

  // The sum is computed in two steps: the rows come in num_groups groups of group_sizes[g] rows; each group is summed and
  // rounded as by weighted_sum, then these partial sums are.
  void (*sum_of_groups)(epx_dtype dtype, std::byte* out, const std::byte* const* rows, const float* weights,
                        const int* group_sizes, int num_groups, int64_t cols);

  // out[c] = round(weight * in[c]). out may be in.
  void (*scale)(epx_dtype dtype, std::byte* out, const std::byte* in, float weight, int64_t cols);

  // acc[c mod 256] = fma(a[c], b[c], acc[c mod 256]) from +0 with c ascending; then adjacent pairs are added until one is
  // left.
  float (*dot)(epx_dtype a_dtype, const std::byte* a, epx_dtype b_dtype, const std::byte* b, int64_t cols);

  // Quantises a row of `hidden` elements of dtype `in`. elements has room for format.element_bytes(hidden), scales for
  // format.scale_bytes(hidden); it needs no alignment. NV alone reads encode_scale, which is the row's own if null, and writes
  // row_scale.
  void (*quantise)(const WireFormat& format, epx_dtype in, const std::byte* row, int64_t hidden, const float* encode_scale,
                   std::byte* elements, std::byte* scales, float* row_scale);

  // The inverse: row[c] = round(element c times its scale, times *weight if it is not null), each in float32, rounded to dtype
  // `out`. NV alone reads row_scale.
  void (*dequantise)(const WireFormat& format, epx_dtype out, const std::byte* elements, const std::byte* scales,
                     float row_scale, const float* weight, int64_t hidden, std::byte* row);
};

// Returns the fastest kernels that this processor runs.
const RowKernels& row_kernels();

// Tests index all kernels that this processor runs; the portable ones come first.
int num_row_kernels();
const RowKernels& row_kernels(int index);

} // namespace epx::rows
