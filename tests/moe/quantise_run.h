// SPDX-License-Identifier: Apache-2.0
// Calls the quantisers for the tests, with scribbled outputs, and says what the oracle of row formats makes of the same input.
// Codes and scales of a byte are tensors of bytes here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "epx/epx_moe.h"
#include "runtime/reference/formats.h"
#include "tests/moe/ffn_run.h"
#include "tests/moe/tensors.h"

namespace epx::test {

inline constexpr int64_t kQuantiseBlock = 128;
inline constexpr int64_t kSquare = kQuantiseBlock * kQuantiseBlock; // elements of a block of weights

// What a call is given for a tensor of bytes, or of a part of one.
template <typename T>
epx_tensor view_as(const Tensor<T>& tensor, epx_dtype dtype, std::initializer_list<int64_t> shape) {
  epx_tensor view = *tensor.get();
  view.dtype = dtype;
  view.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view.sizes);
  return view;
}

template <typename T>
reference::Matrix matrix_of(const Tensor<T>& tensor, epx_dtype dtype, int64_t rows, int64_t columns) {
  reference::Matrix matrix = {dtype, rows, columns, {}};
  matrix.bytes.resize(static_cast<size_t>(tensor.count()) * sizeof(T));
  for (int64_t i = 0; i < tensor.count(); ++i)
    std::memcpy(matrix.bytes.data() + static_cast<size_t>(i) * sizeof(T), &tensor[i], sizeof(T));
  return matrix;
}

inline uint8_t byte_of(const reference::Matrix& matrix, int64_t i) {
  return std::to_integer<uint8_t>(matrix.bytes.at(static_cast<size_t>(i)));
}

// How rows and weights are quantised.
struct QuantiseFormat {
  epx_scaling scaling = EPX_SCALING_BLOCK128;
  float amax_floor = 1e-4f;
  epx_dtype row_scales = EPX_FLOAT32;
  epx_scale_layout layout = EPX_SCALES_ROWS;

  epx_row_format get() const {
    epx_row_format format = format_of(scaling);
    format.amax_floor = amax_floor;
    format.scale_layout = layout;
    return format;
  }
  reference::Format oracle(epx_dtype scales) const { return {scaling, EPX_FLOAT8_E4M3, scales, amax_floor}; }
};

inline QuantiseFormat random_format(Rng& rng) {
  QuantiseFormat format;
  format.amax_floor = rng.pick<float>({0.0f, 1e-4f, 2.0f});
  if (rng.chance(50)) format.scaling = EPX_SCALING_BLOCK128_POW2;
  if (format.scaling == EPX_SCALING_BLOCK128_POW2 && rng.chance(60)) format.row_scales = EPX_FLOAT8_E8M0;
  format.layout = format.row_scales == EPX_FLOAT32
                      ? rng.pick({EPX_SCALES_ROWS, EPX_SCALES_COLUMNS})
                      : rng.pick({EPX_SCALES_ROWS, EPX_SCALES_COLUMNS, EPX_SCALES_PACKED, EPX_SCALES_TILES});
  return format;
}

// Numbers of all magnitudes in some rows, of one magnitude in others, and now and then what is special.
inline double random_element(Rng& rng, int percent_special, int exponent) {
  if (rng.chance(percent_special))
    return rng.pick<double>({0.0, -0.0, std::nan(""), -std::nan(""), INFINITY, -INFINITY, 0x1p-149, -0x1p-133, 0x1p-24,
                             3.4028234663852886e38, -3.4028234663852886e38, 448, 0x1p-126});
  return std::ldexp(uniform(rng), exponent);
}
template <typename T>
Tensor<T> random_rows(std::initializer_list<int64_t> shape, int64_t row_size, Rng& rng) {
  Tensor<T> tensor(shape);
  int exponent = 0, percent_special = 0;
  for (int64_t i = 0; i < tensor.count(); ++i) {
    if (i % row_size == 0) {
      exponent = rng.chance(50) ? 0 : static_cast<int>(rng.between(-140, 120));
      percent_special = rng.chance(60) ? 0 : static_cast<int>(rng.pick<int64_t>({1, 20, 100}));
    }
    tensor[i] = T(random_element(rng, percent_special, rng.chance(5) ? exponent - 8 : exponent));
  }
  return tensor;
}

// ---- Rows ----

// Rows that are E4M3 already.
struct Fp8Rows {
  Tensor<uint8_t> codes; // [N, H]
  Tensor<float> scales;  // in the layout
  epx_scale_layout layout = EPX_SCALES_ROWS;
  int64_t num_rows = 0, hidden = 0;

  Fp8Rows(int64_t rows, int64_t size, epx_scale_layout scale_layout)
      : codes({rows, size}), scales(scale_layout == EPX_SCALES_ROWS ? Tensor<float>({rows, size / 128})
                                                                    : Tensor<float>({size / 128, (rows + 3) / 4 * 4})),
        layout(scale_layout), num_rows(rows), hidden(size) {}

  float& scale(int64_t row, int64_t block) { return layout == EPX_SCALES_ROWS ? scales(row, block) : scales(block, row); }
};

inline Fp8Rows random_fp8_rows(int64_t rows, int64_t hidden, Rng& rng) {
  Fp8Rows fp8(rows, hidden, rng.pick({EPX_SCALES_ROWS, EPX_SCALES_COLUMNS}));
  const bool is_special = rng.chance(40);
  for (int64_t i = 0; i < fp8.codes.count(); ++i) {
    fp8.codes[i] = static_cast<uint8_t>(rng.next());
    if (!is_special && fp8.codes[i] % 128 == 127) fp8.codes[i] = 0; // is a NaN
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t block = 0; block < hidden / 128; ++block)
      fp8.scale(row, block) =
          is_special && rng.chance(20)
              ? rng.pick<float>({0, -1, std::nanf(""), INFINITY, 0x1p-149f, 0x1p-126f, 3.4028234e38f})
              : static_cast<float>(std::ldexp(uniform(rng, 1, 2), static_cast<int>(rng.between(-20, 20))));
  return fp8;
}

// The input of a call as it is passed, and the numbers that it stands for.
struct RowsInput {
  epx_tensor rows;
  const epx_tensor* scales = nullptr;
  epx_scale_layout layout = EPX_SCALES_ROWS;
  reference::Matrix values; // [N, H]: FLOAT32, FLOAT16 or BFLOAT16
};
template <typename T>
RowsInput input_of(const Tensor<T>& rows) {
  return {*rows.get(), nullptr, EPX_SCALES_ROWS, matrix_of(rows, kDtype<T>, rows.size(0), rows.size(1))};
}
inline RowsInput input_of(Fp8Rows& rows) {
  Tensor<float> scales({rows.num_rows, rows.hidden / 128});
  for (int64_t row = 0; row < rows.num_rows; ++row)
    for (int64_t block = 0; block < rows.hidden / 128; ++block)
      scales(row, block) = rows.scale(row, block);
  const reference::Format format = {EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0};
  const reference::QuantisedRows quantised = {matrix_of(rows.codes, EPX_FLOAT8_E4M3, rows.num_rows, rows.hidden),
                                              matrix_of(scales, EPX_FLOAT32, rows.num_rows, rows.hidden / 128),
                                              {}};
  return {view_as(rows.codes, EPX_FLOAT8_E4M3, {rows.num_rows, rows.hidden}), rows.scales.get(), rows.layout,
          reference::dequantise(format, quantised, EPX_FLOAT32)};
}

inline reference::ReceivedScales scales_shape(const QuantiseFormat& format, int64_t rows, int64_t hidden) {
  return {format.layout, format.row_scales, rows, hidden / 128, {}};
}

// What a call writes, or what it is to write: untouched parts have the bytes of scribbled().
struct QuantisedRows {
  Tensor<uint8_t> row_codes;    // [N, H]
  Tensor<uint8_t> row_scales;   // bytes of the layout
  Tensor<uint8_t> column_codes; // [H, N]
  Tensor<float> column_scales;  // [N / 128 + E_l, H]

  QuantisedRows(const QuantiseFormat& format, int64_t rows, int64_t hidden, int64_t zones)
      : row_codes(scribbled<uint8_t>({rows, hidden})),
        row_scales(scribbled<uint8_t>({reference::bytes_of(scales_shape(format, rows, hidden))})),
        column_codes(scribbled<uint8_t>({hidden, rows})), column_scales(scribbled<float>({rows / 128 + zones, hidden})) {}

  std::string difference_to(const QuantisedRows& expected) const {
    std::string all;
    const auto add = [&](const char* what, const std::string& found) {
      if (!found.empty()) all += std::string(what) + ": " + found + ". ";
    };
    add("row_codes", difference(row_codes, expected.row_codes));
    add("row_scales", difference(row_scales, expected.row_scales));
    add("column_codes", difference(column_codes, expected.column_codes));
    add("column_scales", difference(column_scales, expected.column_scales));
    return all;
  }
};

inline epx_tensor scales_view(const Tensor<uint8_t>& scales, const QuantiseFormat& format, int64_t rows, int64_t hidden) {
  const int64_t count = hidden / 128, words = (count + 3) / 4, ld = (rows + 3) / 4 * 4;
  switch (format.layout) {
  case EPX_SCALES_ROWS:
    return view_as(scales, format.row_scales, {rows, count});
  case EPX_SCALES_COLUMNS:
    return view_as(scales, format.row_scales, {count, ld});
  case EPX_SCALES_PACKED:
    return view_as(scales, EPX_INT32, {words, ld});
  case EPX_SCALES_TILES:
    break;
  }
  return view_as(scales, format.row_scales, {(rows + 127) / 128, words, 512});
}

enum class Wanted { rows, columns, both };

// The args of a call, which point to the members.
struct QuantiseRowsCall {
  epx_row_format format;
  RowsInput input;
  epx_tensor row_codes, row_scales, column_codes;
  epx_moe_quantise_rows_args args = {};

  // zones NULL: none are given.
  QuantiseRowsCall(const QuantiseFormat& how, RowsInput rows, const Zones* zones, const QuantisedRows& outputs,
                   Wanted wanted = Wanted::both)
      : format(how.get()), input(std::move(rows)) {
    const int64_t num_rows = input.rows.sizes[0], hidden = input.rows.sizes[1];
    row_codes = view_as(outputs.row_codes, EPX_FLOAT8_E4M3, {num_rows, hidden});
    row_scales = scales_view(outputs.row_scales, how, num_rows, hidden);
    column_codes = view_as(outputs.column_codes, EPX_FLOAT8_E4M3, {hidden, num_rows});
    args.struct_size = sizeof(args);
    args.format = &format;
    args.rows = &input.rows;
    args.scales = input.scales;
    args.scale_layout = input.layout;
    if (zones != nullptr) {
      args.counts = zones->counts.get();
      args.offsets = zones->offsets.get();
    }
    if (wanted == Wanted::columns)
      format.scale_layout = EPX_SCALES_ROWS;
    else
      args.row_codes = &row_codes, args.row_scales = &row_scales;
    if (wanted != Wanted::rows) args.column_codes = &column_codes, args.column_scales = outputs.column_scales.get();
    args.cuda = place_of_call();
  }
  QuantiseRowsCall(const QuantiseRowsCall&) = delete;
  QuantiseRowsCall& operator=(const QuantiseRowsCall&) = delete;
};

template <typename Rows>
QuantisedRows run_quantise_rows(const QuantiseFormat& format, Rows& rows, const Zones* zones,
                                Wanted wanted = Wanted::both) {
  RowsInput input = input_of(rows);
  QuantisedRows outputs(format, input.rows.sizes[0], input.rows.sizes[1], zones != nullptr ? zones->counts.count() : 1);
  const QuantiseRowsCall call(format, std::move(input), zones, outputs, wanted);
  require_ok(epx_moe_quantise_rows(&call.args), "epx_moe_quantise_rows");
  finish_call();
  return outputs;
}

// What epx_moe.h says, by the oracle.
inline QuantisedRows expected_rows(const QuantiseFormat& format, const reference::Matrix& values, const Zones* zones,
                                   Wanted wanted = Wanted::both) {
  const int64_t num_rows = values.rows, hidden = values.cols;
  const int64_t num_zones = zones != nullptr ? zones->counts.count() : 1;
  QuantisedRows expected(format, num_rows, hidden, num_zones);

  const reference::QuantisedRows rows = reference::quantise(format.oracle(format.row_scales), values);
  reference::ReceivedScales received = scales_shape(format, num_rows, hidden);
  received.bytes.assign(static_cast<size_t>(expected.row_scales.count()), std::byte{0xA5});
  const reference::FormatTensors tensors = {
      format.oracle(format.row_scales), std::span(&rows.scales, 1), {}, {}, std::span(&received, 1), {}};
  const reference::Arrivals arrivals(std::span(&rows.elements, 1), &tensors);

  int64_t first_scales = 0;
  for (int64_t e = 0; e < num_zones; ++e) {
    const int64_t first = zones != nullptr ? zones->offsets[e] : 0;
    const int64_t end = zones != nullptr ? zones->offsets[e + 1] : num_rows;
    const int64_t count = zones != nullptr ? zones->counts[e] : num_rows;
    first_scales = first / 128 + e;
    for (int64_t at = 0; at < count; at += kQuantiseBlock) {
      const int64_t last = std::min(at + kQuantiseBlock, count);               // of the block's rows
      const int64_t last_written = std::min(at + kQuantiseBlock, end - first); // of them and their pads
      for (int64_t i = at; i < last_written && wanted != Wanted::columns; ++i) {
        for (int64_t h = 0; h < hidden; ++h)
          expected.row_codes(first + i, h) = i < last ? byte_of(rows.elements, (first + i) * hidden + h) : 0;
        if (i < last)
          arrivals.put_scales(0, first + i, 0, first + i);
        else
          arrivals.zero_scales(0, first + i);
      }
      if (wanted == Wanted::rows) continue;
      Tensor<float> columns({hidden, last - at});
      for (int64_t h = 0; h < hidden; ++h)
        for (int64_t i = at; i < last; ++i)
          columns(h, i - at) = reference::load(values, first + i, h);
      const reference::QuantisedRows quantised =
          reference::quantise(format.oracle(EPX_FLOAT32), matrix_of(columns, EPX_FLOAT32, hidden, last - at));
      for (int64_t h = 0; h < hidden; ++h) {
        for (int64_t i = at; i < last_written; ++i)
          expected.column_codes(h, first + i) = i < last ? byte_of(quantised.elements, h * (last - at) + i - at) : 0;
        expected.column_scales(first_scales + at / 128, h) = reference::load(quantised.scales, h, 0);
      }
    }
  }
  for (int64_t i = 0; i < expected.row_scales.count(); ++i)
    expected.row_scales[i] = std::to_integer<uint8_t>(received.bytes[static_cast<size_t>(i)]);
  return expected;
}

// Zones of which some are empty and some have a row more or less than whole blocks; `stride` > 0: zones of a fixed stride.
inline Zones random_quantise_zones(Rng& rng) {
  std::vector<int32_t> counts;
  for (int64_t zones = rng.between(1, 5); zones > 0; --zones)
    counts.push_back(rng.pick<int32_t>({0, 0, 1, 5, 16, 127, 128, 129, 200, 257}));
  return make_zones(counts, rng.pick<int32_t>({1, 4, 8, 16, 128, 160, 300}), rng.pick<int64_t>({0, 1, 3, 8, 130}));
}

// ---- Weights ----

struct QuantisedWeights {
  Tensor<uint8_t> codes; // [E_l, R, C]
  Tensor<float> scales;  // [E_l, R / 128, C / 128]
  Tensor<uint8_t> transposed_codes;
  Tensor<float> transposed_scales;

  QuantisedWeights(int64_t e, int64_t r, int64_t c)
      : codes(scribbled<uint8_t>({e, r, c})), scales(scribbled<float>({e, r / 128, c / 128})),
        transposed_codes(scribbled<uint8_t>({e, c, r})), transposed_scales(scribbled<float>({e, c / 128, r / 128})) {}

  std::string difference_to(const QuantisedWeights& expected) const {
    return difference(codes, expected.codes) + difference(scales, expected.scales) +
           difference(transposed_codes, expected.transposed_codes) +
           difference(transposed_scales, expected.transposed_scales);
  }
};

enum class Orientation { given, transposed, both };

template <typename T>
QuantisedWeights run_quantise_weights(const QuantiseFormat& how, const Tensor<T>& weights,
                                      Orientation orientation = Orientation::both) {
  const int64_t e = weights.size(0), r = weights.size(1), c = weights.size(2);
  QuantisedWeights outputs(e, r, c);
  const epx_row_format format = how.get();
  const epx_tensor codes = view_as(outputs.codes, EPX_FLOAT8_E4M3, {e, r, c});
  const epx_tensor transposed = view_as(outputs.transposed_codes, EPX_FLOAT8_E4M3, {e, c, r});
  epx_moe_quantise_weights_args args = {};
  args.struct_size = sizeof(args);
  args.format = &format;
  args.weights = weights.get();
  if (orientation != Orientation::transposed) args.codes = &codes, args.scales = outputs.scales.get();
  if (orientation != Orientation::given)
    args.transposed_codes = &transposed, args.transposed_scales = outputs.transposed_scales.get();
  args.cuda = place_of_call();
  require_ok(epx_moe_quantise_weights(&args), "epx_moe_quantise_weights");
  finish_call();
  return outputs;
}

// A row of 128 elements is quantised as the block is that it belongs to when the floor is the block's amax.
template <typename T>
QuantisedWeights expected_weights(const QuantiseFormat& how, const Tensor<T>& weights,
                                  Orientation orientation = Orientation::both) {
  const int64_t e = weights.size(0), r = weights.size(1), c = weights.size(2);
  QuantisedWeights expected(e, r, c);
  for (int64_t block = 0; block < e * (r / 128) * (c / 128); ++block) {
    const int64_t matrix = block / (c / 128) / (r / 128);
    const int64_t row_block = block / (c / 128) % (r / 128), column_block = block % (c / 128);
    Tensor<float> tile({128, 128});
    QuantiseFormat format = how;
    for (int64_t i = 0; i < kSquare; ++i) {
      tile[i] = static_cast<float>(weights(matrix, (row_block * 128 + i / 128) * c + column_block * 128 + i % 128));
      if (std::isfinite(tile[i])) format.amax_floor = std::max(format.amax_floor, std::fabs(tile[i]));
    }
    const auto quantised = reference::quantise(format.oracle(EPX_FLOAT32), matrix_of(tile, EPX_FLOAT32, 128, 128));
    const float scale = reference::load(quantised.scales, 0, 0);
    for (int64_t i = 0; i < kSquare; ++i) {
      const int64_t row = row_block * 128 + i / 128, column = column_block * 128 + i % 128;
      if (orientation != Orientation::transposed) expected.codes(matrix, row * c + column) = byte_of(quantised.elements, i);
      if (orientation != Orientation::given)
        expected.transposed_codes(matrix, column * r + row) = byte_of(quantised.elements, i);
    }
    if (orientation != Orientation::transposed) expected.scales(matrix, row_block * (c / 128) + column_block) = scale;
    if (orientation != Orientation::given) expected.transposed_scales(matrix, column_block * (r / 128) + row_block) = scale;
  }
  return expected;
}

} // namespace epx::test
