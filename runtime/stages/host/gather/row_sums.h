// SPDX-License-Identifier: Apache-2.0
// RowSums sums rows that lie scattered in memory. While one sum is computed, the rows of the next are prefetched into the
// cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/names.h"
#include "runtime/config.h"
#include "runtime/stages/host/rows/rows.h"

namespace epx::host {

// A RowSum is one sum: out = round(sum of weights[i] * rows[i]), or, when the rows come in groups, the rounded sum of the
// groups' rounded partial sums.
struct RowSum {
  std::byte* out = nullptr;
  int num_rows = 0;
  int num_groups = 0;
  std::array<const std::byte*, kMaxTopK> rows;
  std::array<float, kMaxTopK> weights;
  std::array<int, kMaxTopK> group_sizes;

  void add(const std::byte* row, float weight) {
    weights[static_cast<size_t>(num_rows)] = weight;
    rows[static_cast<size_t>(num_rows++)] = row;
  }
  // Makes one group of the rows added since the last call.
  void end_group() {
    int grouped = 0;
    for (int group = 0; group < num_groups; ++group)
      grouped += group_sizes[static_cast<size_t>(group)];
    if (num_rows > grouped) group_sizes[static_cast<size_t>(num_groups++)] = num_rows - grouped;
  }
};

class RowSums {
public:
  RowSums(epx_dtype dtype, int64_t cols, bool weighted)
      : dtype_(dtype), cols_(cols), weighted_(weighted),
        prefetch_bytes_(std::min<int64_t>(row_bytes(dtype, cols), kMaxPrefetchBytes)) {}

  // Returns the next sum, to which the caller adds rows. It is valid until submit_next.
  RowSum& next(std::byte* out) {
    RowSum& sum = sums_[current_ ^ 1];
    sum.out = out;
    sum.num_rows = 0;
    sum.num_groups = 0;
    return sum;
  }

  // Prefetches the rows of the next sum, and computes the one before.
  void submit_next() {
    current_ ^= 1;
    const RowSum& sum = sums_[current_];
    for (int row = 0; row < sum.num_rows; ++row)
      for (int64_t byte = 0; byte < prefetch_bytes_; byte += kCacheLineBytes)
        __builtin_prefetch(sum.rows[static_cast<size_t>(row)] + byte, 0, 2);
    for (int64_t byte = 0; byte < prefetch_bytes_; byte += kCacheLineBytes)
      __builtin_prefetch(sum.out + byte, 1, 2);
    compute(sums_[current_ ^ 1]);
    sums_[current_ ^ 1].out = nullptr;
  }

  // Computes the last sum.
  void finish() { compute(sums_[current_]); }

private:
  static constexpr int64_t kCacheLineBytes = 64;
  static constexpr int64_t kMaxPrefetchBytes = 2048; // the hardware prefetches the rest of a longer row in time

  void compute(const RowSum& sum) const {
    if (sum.out == nullptr) return;
    const float* weights = weighted_ ? sum.weights.data() : nullptr;
    if (sum.num_groups > 0)
      kernels_.sum_of_groups(dtype_, sum.out, sum.rows.data(), weights, sum.group_sizes.data(), sum.num_groups, cols_);
    else
      kernels_.weighted_sum(dtype_, sum.out, sum.rows.data(), weights, sum.num_rows, cols_);
  }

  const rows::RowKernels& kernels_ = rows::row_kernels();
  epx_dtype dtype_;
  int64_t cols_;
  bool weighted_;
  int64_t prefetch_bytes_;
  std::array<RowSum, 2> sums_;
  size_t current_ = 0; // index of the sum that is submitted and not computed yet
};

} // namespace epx::host
