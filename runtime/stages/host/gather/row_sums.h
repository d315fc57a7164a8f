// SPDX-License-Identifier: Apache-2.0
// RowSums sums rows that lie scattered in memory. While one sum is computed, the rows of the next are prefetched into the
// cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/dtypes.h"
#include "runtime/config.h"
#include "runtime/stages/host/rows/rows.h"
#include "runtime/stages/host/rows/wire_rows.h"
#include "runtime/stages/stages.h"

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

// What is summed, and what the sum becomes, is a policy S of RowSums:
//   row_bytes(), out_bytes()   of a row and of a sum
//   compute(sum)               computes it

// Rows and sums of the dtype of the call.
class PlainSums {
public:
  PlainSums(const MovementCall& call, bool weighted) : call_(call), weighted_(weighted) {}

  int64_t row_bytes() const { return epx::row_bytes(call_.dtype, call_.hidden); }
  int64_t out_bytes() const { return row_bytes(); }
  void compute(const RowSum& sum) const {
    const float* weights = weighted_ ? sum.weights.data() : nullptr;
    if (sum.num_groups > 0)
      kernels_.sum_of_groups(call_.dtype, sum.out, sum.rows.data(), weights, sum.group_sizes.data(), sum.num_groups,
                             call_.hidden);
    else
      kernels_.weighted_sum(call_.dtype, sum.out, call_.dtype, sum.rows.data(), weights, sum.num_rows, call_.hidden);
  }

private:
  const MovementCall& call_;
  const rows::RowKernels& kernels_ = rows::row_kernels();
  bool weighted_;
};

// The sum of rows of the dtype of the call, quantised for the wire: WireRow.
class SumsToWire {
public:
  SumsToWire(const MovementCall& call, bool weighted)
      : call_(call), wire_(call.format, call.hidden), weighted_(weighted), sum_(static_cast<size_t>(call.hidden)) {}

  int64_t row_bytes() const { return epx::row_bytes(call_.dtype, call_.hidden); }
  int64_t out_bytes() const { return wire_.bytes(); }
  void compute(const RowSum& sum) {
    auto* const row = reinterpret_cast<std::byte*>(sum_.data());
    kernels_.weighted_sum(EPX_FLOAT32, row, call_.dtype, sum.rows.data(), weighted_ ? sum.weights.data() : nullptr,
                          sum.num_rows, call_.hidden);
    wire_.quantise(EPX_FLOAT32, row, nullptr, sum.out);
  }

private:
  const MovementCall& call_;
  const rows::RowKernels& kernels_ = rows::row_kernels();
  WireRows wire_;
  bool weighted_;
  std::vector<float> sum_; // [H]
};

// The sum, in the dtype of the call, of rows as SumsToWire makes them.
class SumsOfWire {
public:
  explicit SumsOfWire(const MovementCall& call) : call_(call), wire_(call.format, call.hidden) {}

  int64_t row_bytes() const { return wire_.bytes(); }
  int64_t out_bytes() const { return epx::row_bytes(call_.dtype, call_.hidden); }
  void compute(const RowSum& sum) {
    const auto hidden = static_cast<size_t>(call_.hidden), num_rows = static_cast<size_t>(sum.num_rows);
    if (dequantised_.size() < num_rows * hidden) dequantised_.resize(num_rows * hidden);
    std::array<const std::byte*, kMaxTopK> rows;
    for (size_t i = 0; i < num_rows; ++i) {
      auto* const row = reinterpret_cast<std::byte*>(dequantised_.data() + i * hidden);
      wire_.dequantise(sum.rows[i], EPX_FLOAT32, nullptr, row);
      rows[i] = row;
    }
    kernels_.weighted_sum(call_.dtype, sum.out, EPX_FLOAT32, rows.data(), nullptr, sum.num_rows, call_.hidden);
  }

private:
  const MovementCall& call_;
  const rows::RowKernels& kernels_ = rows::row_kernels();
  WireRows wire_;
  std::vector<float> dequantised_; // [rows, H]
};

template <typename Sums>
class RowSums {
public:
  explicit RowSums(Sums sums) : sums_(std::move(sums)) {}

  // Returns the next sum, to which the caller adds rows. It is valid until submit_next.
  RowSum& next(std::byte* out) {
    RowSum& sum = queue_[current_ ^ 1];
    sum.out = out;
    sum.num_rows = 0;
    sum.num_groups = 0;
    return sum;
  }

  // Prefetches the rows of the next sum, and computes the one before.
  void submit_next() {
    current_ ^= 1;
    const RowSum& sum = queue_[current_];
    for (int row = 0; row < sum.num_rows; ++row)
      for (int64_t byte = 0; byte < row_prefetch_; byte += kCacheLineBytes)
        __builtin_prefetch(sum.rows[static_cast<size_t>(row)] + byte, 0, 2);
    for (int64_t byte = 0; byte < out_prefetch_; byte += kCacheLineBytes)
      __builtin_prefetch(sum.out + byte, 1, 2);
    compute(queue_[current_ ^ 1]);
    queue_[current_ ^ 1].out = nullptr;
  }

  // Computes the last sum.
  void finish() { compute(queue_[current_]); }

private:
  static constexpr int64_t kCacheLineBytes = 64;
  static constexpr int64_t kMaxPrefetchBytes = 2048; // the hardware prefetches the rest of a longer row in time

  void compute(const RowSum& sum) {
    if (sum.out != nullptr) sums_.compute(sum);
  }

  Sums sums_;
  int64_t row_prefetch_ = std::min(sums_.row_bytes(), kMaxPrefetchBytes);
  int64_t out_prefetch_ = std::min(sums_.out_bytes(), kMaxPrefetchBytes);
  std::array<RowSum, 2> queue_;
  size_t current_ = 0; // index of the sum that is submitted and not computed yet
};

} // namespace epx::host
