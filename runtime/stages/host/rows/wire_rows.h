// SPDX-License-Identifier: Apache-2.0
// Quantised rows as they lie in staging: WireRow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "epx/epx.h"
#include "runtime/formats/row_format.h"
#include "runtime/stages/host/rows/rows.h"

namespace epx::host {

class WireRows {
public:
  WireRows(const WireFormat& format, int64_t hidden)
      : format_(format), hidden_(hidden), layout_(format, hidden),
        element_bytes_(static_cast<size_t>(format.element_bytes(hidden))),
        scale_bytes_(static_cast<size_t>(format.scale_bytes(hidden))) {}

  int64_t bytes() const { return layout_.bytes; } // of a row, and of its elements and scales alone
  size_t element_bytes() const { return element_bytes_; }
  size_t scale_bytes() const { return scale_bytes_; }
  const std::byte* scales(const std::byte* wire) const { return wire + layout_.scales; }
  float row_scale(const std::byte* wire) const { // 0 where the format has none
    float row_scale = 0.0f;
    if (format_.has_row_scale()) std::memcpy(&row_scale, wire + layout_.row_scale, sizeof(row_scale));
    return row_scale;
  }

  // Quantises a row [H] of dtype `in`. encode_scale is NV's: the row's own if NULL.
  void quantise(epx_dtype in, const std::byte* row, const float* encode_scale, std::byte* wire) const {
    float row_scale = 0.0f;
    kernels_.quantise(format_, in, row, hidden_, encode_scale, wire, wire + layout_.scales, &row_scale);
    set_row_scale(wire, row_scale);
  }
  // Copies a row that is quantised already.
  void copy(const std::byte* elements, const std::byte* scales, float row_scale, std::byte* wire) const {
    std::memcpy(wire, elements, element_bytes_);
    std::memcpy(wire + layout_.scales, scales, scale_bytes_);
    set_row_scale(wire, row_scale);
  }
  // Writes what the row stands for, times *weight unless that is NULL, as a row [H] of dtype `out`.
  void dequantise(const std::byte* wire, epx_dtype out, const float* weight, std::byte* row) const {
    kernels_.dequantise(format_, out, wire, wire + layout_.scales, row_scale(wire), weight, hidden_, row);
  }

private:
  void set_row_scale(std::byte* wire, float row_scale) const {
    if (format_.has_row_scale()) std::memcpy(wire + layout_.row_scale, &row_scale, sizeof(row_scale));
  }

  const rows::RowKernels& kernels_ = rows::row_kernels();
  WireFormat format_;
  int64_t hidden_;
  WireRow layout_;
  size_t element_bytes_, scale_bytes_;
};

} // namespace epx::host
