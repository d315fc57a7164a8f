// SPDX-License-Identifier: Apache-2.0
// The row kernels quantise: a column of the weights is a row to them.
#include "moe/quantise/weight_rows.h"

#include <vector>

#include "base/dtypes.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/rows.h"

namespace epx::moe {
namespace {

// Quantises rows of `size` elements.
class WeightRowsWriter {
public:
  WeightRowsWriter(const QuantiseWeightRows& call, const WeightRows& to, int64_t size)
      : call_(call), to_(to), size_(size), scales_(static_cast<size_t>(to.layout.num_scales)) {}

  void put(int64_t row, const std::byte* from) {
    float row_scale = 0.0f;
    kernels_.quantise(call_.format, call_.dtype, from, size_, nullptr, to_.codes + row * call_.format.element_bytes(size_),
                      scales_.data(), &row_scale);
    for (int64_t s = 0; s < to_.layout.num_scales; ++s) // of one byte each
      to_.scales[to_.layout.offset(row, s)] = scales_[static_cast<size_t>(s)];
    if (to_.row_scales != nullptr) to_.row_scales[row] = row_scale;
  }

private:
  const rows::RowKernels& kernels_ = rows::row_kernels();
  const QuantiseWeightRows& call_;
  const WeightRows& to_;
  int64_t size_;
  std::vector<std::byte> scales_; // [S] of a row
};

void quantise_given(const QuantiseWeightRows& call) {
  WeightRowsWriter writer(call, call.given, call.num_columns);
  const int64_t bytes_of_row = row_bytes(call.dtype, call.num_columns);
  const auto* const weights = static_cast<const std::byte*>(call.weights);
  for (int64_t row = 0; row < call.num_matrices * call.num_rows; ++row)
    writer.put(row, weights + row * bytes_of_row);
}

// Bits: of an element. Some columns at a time, so that the weights are read from memory once.
template <typename Bits>
void quantise_transposed(const QuantiseWeightRows& call) {
  WeightRowsWriter writer(call, call.transposed, call.num_rows);
  std::vector<Bits> columns(static_cast<size_t>(kQuantiseBlock * call.num_rows)); // [columns, R]
  for (int64_t matrix = 0; matrix < call.num_matrices; ++matrix)
    for (int64_t first = 0; first < call.num_columns; first += kQuantiseBlock) {
      const Bits* const weights =
          static_cast<const Bits*>(call.weights) + matrix * call.num_rows * call.num_columns + first;
      for (int64_t r = 0; r < call.num_rows; ++r)
        for (int64_t c = 0; c < kQuantiseBlock; ++c)
          columns[static_cast<size_t>(c * call.num_rows + r)] = weights[r * call.num_columns + c];
      for (int64_t c = 0; c < kQuantiseBlock; ++c)
        writer.put(matrix * call.num_columns + first + c,
                   reinterpret_cast<const std::byte*>(&columns[static_cast<size_t>(c * call.num_rows)]));
    }
}

} // namespace

void quantise(const QuantiseWeightRows& call) {
  const host::DefaultFloatEnvironment environment;
  if (call.given.codes != nullptr) quantise_given(call);
  if (call.transposed.codes == nullptr) return;
  if (single_element_bytes(call.dtype) == 4)
    quantise_transposed<uint32_t>(call);
  else
    quantise_transposed<uint16_t>(call);
}

} // namespace epx::moe
