// SPDX-License-Identifier: Apache-2.0
// The oracle of quantised rows, beside reference.h and like it: written from the group "Row formats" of epx.h and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/reference/reference.h"

namespace epx::reference {

// What ranks agree on.
struct Format {
  epx_scaling scaling = EPX_SCALING_NONE;
  epx_dtype dtype = EPX_DTYPE_UNSET;  // of elements
  epx_dtype scales = EPX_DTYPE_UNSET; // the dtype of scales
  float amax_floor = 0.0F;
};

int64_t num_scales(epx_scaling scaling, int64_t hidden); // S

// A rank's rows as they travel.
struct QuantisedRows {
  Matrix elements;               // [rows, H]
  Matrix scales;                 // [rows, S]
  std::vector<float> row_scales; // [rows]; NV only
};

// `rows` are FLOAT32, FLOAT16 or BFLOAT16. encode_scale is for NV.
QuantisedRows quantise(const Format& format, const Matrix& rows, std::optional<float> encode_scale = {});
Matrix dequantise(const Format& format, const QuantisedRows& rows, epx_dtype dtype);

// recv_scales of one rank.
struct ReceivedScales {
  epx_scale_layout layout = EPX_SCALES_ROWS;
  epx_dtype dtype = EPX_DTYPE_UNSET; // of one scale: INT32 is that of a packed tensor, not of its scales
  int64_t rows = 0;                  // N
  int64_t num_scales = 0;            // S
  std::vector<std::byte> bytes;      // in the layout
};

int64_t bytes_of(const ReceivedScales& shape); // that the layout takes

// The format of a dispatch, with one entry per rank in each span; an empty span means "not passed".
struct FormatTensors {
  Format format;
  std::span<const Matrix> scales;                      // a: [T, S]
  std::span<const std::vector<float>> row_scales;      // a, NV: [T]
  std::span<const std::optional<float>> encode_scales; // b and c, NV: of the ranks that pass one
  std::span<ReceivedScales> recv_scales;               // a and b
  std::span<std::vector<float>> recv_row_scales;       // a and b, NV: [N]
};

// What a dispatch, or a combine_bwd, brings to its receivers.
class Arrivals {
public:
  // `formats` NULL: the tokens as they are.
  Arrivals(std::span<const Matrix> tokens, const FormatTensors* formats);

  std::span<const Matrix> rows() const { return rows_.empty() ? tokens_ : std::span<const Matrix>(rows_); } // [T, H]
  // With a format, what the elements stand for: FLOAT32 [T, H].
  const Matrix& values(size_t source) const { return values_[source]; }
  // The scales of a token of `source` go to a row of `receiver`, times the weight if there is one, and those of a row become
  // zero. Where no scales arrive, both do nothing.
  void put_scales(size_t source, int64_t token, size_t receiver, int64_t row, std::optional<float> weight = {}) const;
  void zero_scales(size_t receiver, int64_t row) const;

private:
  bool has_scales() const { return formats_ != nullptr && !formats_->recv_scales.empty(); }

  std::span<const Matrix> tokens_;
  const FormatTensors* formats_;
  std::vector<Matrix> rows_; // if they are not the tokens
  std::vector<Matrix> values_;
  std::vector<Matrix> scales_;
  std::vector<std::vector<float>> row_scales_;
};

} // namespace epx::reference
