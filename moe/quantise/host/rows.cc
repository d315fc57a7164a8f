// SPDX-License-Identifier: Apache-2.0
// The row kernels quantise here: a column of a block is a row to them.
#include "moe/quantise/rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/dtypes.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/rows.h"

namespace epx::moe {
namespace {

// Rows of a zone that have scales in common along their columns, and the pads of the zone that complete the block.
struct RowBlock {
  int64_t index; // of the row of column_scales
  int64_t first_row;
  int64_t num_rows;
  int64_t num_pads;
};

template <typename Visit>
void for_each_block(const QuantiseRows& call, const Visit& visit) {
  for (int zone = 0; zone < call.num_zones; ++zone) {
    const int64_t first = call.has_zones ? call.offsets[zone] : 0;
    const int64_t end = call.has_zones ? call.offsets[zone + 1] : call.num_rows;
    const int64_t rows = call.has_zones ? call.counts[zone] : call.num_rows;
    for (int64_t at = 0; at < rows; at += kQuantiseBlock) {
      const int64_t in_block = std::min<int64_t>(rows - at, kQuantiseBlock);
      const int64_t pads = std::min(end - first - at - in_block, kQuantiseBlock - in_block);
      visit(RowBlock{first_zone_block(first, zone) + at / kQuantiseBlock, first + at, in_block, pads});
    }
  }
}

class RowQuantiser {
public:
  explicit RowQuantiser(const QuantiseRows& call)
      : call_(call), dtype_(call.scales != nullptr ? EPX_FLOAT32 : call.dtype), row_bytes_(row_bytes(dtype_, call.hidden)),
        row_scales_(static_cast<size_t>(call.row_format.scale_bytes(call.hidden))) {
    if (call.scales != nullptr) values_.resize(static_cast<size_t>(kQuantiseBlock * call.hidden));
  }

  void quantise(const RowBlock& block) {
    const std::byte* rows = static_cast<const std::byte*>(call_.rows) + block.first_row * row_bytes_;
    if (call_.scales != nullptr) rows = dequantised(block);
    if (call_.row_codes != nullptr) quantise_rows(block, rows);
    if (call_.column_codes == nullptr) return;
    if (single_element_bytes(dtype_) == 4)
      quantise_columns<uint32_t>(block, rows);
    else
      quantise_columns<uint16_t>(block, rows);
  }

private:
  // Returns what the rows of a block stand for.
  const std::byte* dequantised(const RowBlock& block) {
    const WireFormat format{EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0f}; // all rows with float32 scales
    const ScaleLayout& layout = call_.scale_layout;
    std::vector<float> scales(static_cast<size_t>(layout.num_scales));
    for (int64_t i = 0; i < block.num_rows; ++i) {
      const int64_t row = block.first_row + i;
      for (int64_t s = 0; s < layout.num_scales; ++s)
        scales[static_cast<size_t>(s)] = call_.scales[layout.offset(row, s) / layout.scale_bytes];
      kernels_.dequantise(format, EPX_FLOAT32, static_cast<const std::byte*>(call_.rows) + row * call_.hidden,
                          reinterpret_cast<const std::byte*>(scales.data()), 0.0f, nullptr, call_.hidden,
                          reinterpret_cast<std::byte*>(values_.data() + i * call_.hidden));
    }
    return reinterpret_cast<const std::byte*>(values_.data());
  }

  void quantise_rows(const RowBlock& block, const std::byte* rows) {
    const ScaleLayout& layout = call_.row_scale_layout;
    const auto scale_bytes = static_cast<size_t>(layout.scale_bytes);
    for (int64_t i = 0; i < block.num_rows + block.num_pads; ++i) {
      const int64_t row = block.first_row + i;
      uint8_t* const codes = call_.row_codes + row * call_.hidden;
      if (i < block.num_rows) {
        float unused = 0.0f;
        kernels_.quantise(call_.row_format, dtype_, rows + i * row_bytes_, call_.hidden, nullptr,
                          reinterpret_cast<std::byte*>(codes), row_scales_.data(), &unused);
      } else {
        std::memset(codes, 0, static_cast<size_t>(call_.hidden));
        std::ranges::fill(row_scales_, std::byte{0});
      }
      for (int64_t s = 0; s < layout.num_scales; ++s)
        std::memcpy(call_.row_scales + layout.offset(row, s), row_scales_.data() + static_cast<size_t>(s) * scale_bytes,
                    scale_bytes);
      for (int64_t s = layout.num_scales; s < layout.places(); ++s)
        call_.row_scales[layout.offset(row, s)] = std::byte{0};
    }
  }

  // Bits: of an element. A tile of columns at a time, so that the rows are read from memory once.
  template <typename Bits>
  void quantise_columns(const RowBlock& block, const std::byte* rows) {
    const WireFormat format = call_.column_format();
    std::vector<Bits> tile(static_cast<size_t>(kQuantiseBlock) * kQuantiseBlock); // [columns, rows]
    for (int64_t first = 0; first < call_.hidden; first += kQuantiseBlock) {
      for (int64_t i = 0; i < block.num_rows; ++i) {
        const Bits* const row = reinterpret_cast<const Bits*>(rows + i * row_bytes_) + first;
        for (int64_t j = 0; j < kQuantiseBlock; ++j)
          tile[static_cast<size_t>(j * kQuantiseBlock + i)] = row[j];
      }
      for (int64_t j = 0; j < kQuantiseBlock; ++j) {
        uint8_t* const codes = call_.column_codes + (first + j) * call_.num_rows + block.first_row;
        float unused = 0.0f;
        kernels_.quantise(
            format, dtype_, reinterpret_cast<const std::byte*>(&tile[static_cast<size_t>(j * kQuantiseBlock)]),
            block.num_rows, nullptr, reinterpret_cast<std::byte*>(codes),
            reinterpret_cast<std::byte*>(call_.column_scales + block.index * call_.hidden + first + j), &unused);
        std::memset(codes + block.num_rows, 0, static_cast<size_t>(block.num_pads));
      }
    }
  }

  const rows::RowKernels& kernels_ = rows::row_kernels();
  const QuantiseRows& call_;
  epx_dtype dtype_; // of what is quantised
  int64_t row_bytes_;
  std::vector<std::byte> row_scales_; // [S]
  std::vector<float> values_;         // [kQuantiseBlock, H]: of rows that are E4M3
};

} // namespace

void quantise(const QuantiseRows& call) {
  const host::DefaultFloatEnvironment environment;
  RowQuantiser quantiser(call);
  for_each_block(call, [&](const RowBlock& block) { quantiser.quantise(block); });
}

} // namespace epx::moe
