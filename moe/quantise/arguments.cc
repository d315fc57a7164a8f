// SPDX-License-Identifier: Apache-2.0
#include "moe/quantise/arguments.h"

#include <limits>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "moe/ffn/ffn.h"
#include "runtime/formats/format_arguments.h"

namespace epx::moe {

namespace {

bool is_block128(const WireFormat& format) {
  return format.scaling == EPX_SCALING_BLOCK128 || format.scaling == EPX_SCALING_BLOCK128_POW2;
}

// Returns any format. The scales of blocks of 128 are float32.
WireFormat require_format(const epx_row_format* format) {
  if (format == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "format is NULL; it is required");
  require_no_tensors(*format, "format", "the call has its tensors in args");
  WireFormat wire = check_format(*format, "format");
  if (is_block128(wire)) wire.scales = EPX_FLOAT32;
  return wire;
}

QuantiseWeights require_weight_blocks(const WeightTensors& tensors, const WireFormat& format, Dim matrices, Dim rows,
                                      Dim columns) {
  const Blocks row_blocks = blocks_of(rows), column_blocks = blocks_of(columns);
  const auto allow = [&](const NamedTensor& output, epx_dtype dtype, Dim first, Dim second) {
    allow_tensor(output.tensor, output.name, {dtype}, {matrices, first, second});
  };
  allow(tensors.codes, EPX_FLOAT8_E4M3, rows, columns);
  allow(tensors.scales, EPX_FLOAT32, row_blocks.dim(), column_blocks.dim());
  allow(tensors.transposed_codes, EPX_FLOAT8_E4M3, columns, rows);
  allow(tensors.transposed_scales, EPX_FLOAT32, column_blocks.dim(), row_blocks.dim());
  return {.format = format,
          .dtype = tensors.weights.tensor->dtype,
          .weights = tensors.weights.tensor->data,
          .num_matrices = matrices.size,
          .num_rows = rows.size,
          .num_columns = columns.size,
          .codes = data_of<uint8_t>(tensors.codes.tensor),
          .scales = data_of<float>(tensors.scales.tensor),
          .transposed_codes = data_of<uint8_t>(tensors.transposed_codes.tensor),
          .transposed_scales = data_of<float>(tensors.transposed_scales.tensor)};
}

// One orientation of weights whose rows are quantised.
WeightRows allow_weight_rows(const NamedTensor& codes, const NamedTensor& scales, const NamedTensor& row_scales,
                             const WeightsFormat& format, Dim matrices, Dim rows, Dim columns) {
  const WireFormat& wire = format.wire;
  const ScaleLayout layout = {format.layout, static_cast<int>(single_element_bytes(wire.scales)),
                              wire.num_scales(columns.size), matrices.size * rows.size};
  allow_tensor(codes.tensor, codes.name, {wire.elements}, {matrices, rows, columns});
  if (format.layout == EPX_SCALES_TILES)
    allow_tensor(scales.tensor, scales.name, {wire.scales},
                 {matrices,
                  blocks_of(rows).dim(),
                  blocks_of(columns, wire.block() * ScaleLayout::kPerWord).dim(),
                  {"512", ScaleLayout::kTileRows * ScaleLayout::kPerWord}});
  else
    allow_tensor(scales.tensor, scales.name, {wire.scales}, {matrices, rows, blocks_of(columns, wire.block()).dim()});
  if (wire.has_row_scale()) require_both_or_neither(codes.tensor, codes.name, row_scales.tensor, row_scales.name);
  allow_tensor(row_scales.tensor, row_scales.name, {EPX_FLOAT32}, {matrices, rows});
  return {data_of<std::byte>(codes.tensor), data_of<std::byte>(scales.tensor), data_of<float>(row_scales.tensor), layout};
}

// Returns whether the transposes are given.
bool is_transposed(const WeightTensors& tensors) {
  require_both_or_neither(tensors.transposed_codes.tensor, tensors.transposed_codes.name, tensors.transposed_scales.tensor,
                          tensors.transposed_scales.name);
  return tensors.transposed_codes.tensor != nullptr;
}

// The codes have been checked, and have these dimensions.
CheckedTranspose require_transpose(const WeightTensors& tensors, Dim matrices, Dim rows, Dim columns) {
  const Blocks row_blocks = blocks_of(rows), column_blocks = blocks_of(columns);
  const auto require = [&](const NamedTensor& named, epx_dtype dtype, Dim first, Dim second) {
    require_tensor(named.tensor, named.name, {dtype}, {matrices, first, second});
  };
  require(tensors.scales, EPX_FLOAT32, row_blocks.dim(), column_blocks.dim());
  require(tensors.transposed_codes, EPX_FLOAT8_E4M3, columns, rows);
  require(tensors.transposed_scales, EPX_FLOAT32, column_blocks.dim(), row_blocks.dim());
  return {tensors,
          {.num_matrices = matrices.size,
           .num_rows = rows.size,
           .num_columns = columns.size,
           .codes = data_of<const uint8_t>(tensors.codes.tensor),
           .scales = data_of<const float>(tensors.scales.tensor),
           .transposed_codes = data_of<uint8_t>(tensors.transposed_codes.tensor),
           .transposed_scales = data_of<float>(tensors.transposed_scales.tensor)}};
}

} // namespace

WireFormat require_block_format(const epx_row_format* format) {
  const WireFormat wire = require_format(format);
  if (!is_block128(wire))
    fail(EPX_ERROR_INVALID_ARGUMENT, "format.scaling is {}; it must be block128 or block128_pow2", name_of(wire.scaling));
  return wire;
}

int64_t require_blocks(const epx_tensor& tensor, int axis, const char* name, const char* symbol, int block) {
  const int64_t size = tensor.sizes[axis];
  if (size == 0 || size % block != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has {} = {}; it must be a multiple of {}, and not 0", name, symbol, size, block);
  return size;
}

Blocks blocks_of(Dim dim, int block) {
  return {fmt::format("{} / {}", dim.symbol, block), dim.size / block};
}

void require_wanted(const epx_tensor* codes, const char* name, const epx_tensor* others, const char* others_name) {
  if (codes == nullptr && others == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} and {} are NULL; one of them at least must be wanted", name, others_name);
}

void require_scales(const epx_tensor* tensor, const char* name, std::initializer_list<epx_dtype> dtypes,
                    const ScaleLayout& layout) {
  const Dim places{"S", layout.num_scales};
  const Dim words{"ceil(S / 4)", layout.words()};
  const Dim padded_rows{"N rounded up to 4", layout.leading_dimension()};
  switch (layout.layout) {
  case EPX_SCALES_ROWS:
    break;
  case EPX_SCALES_COLUMNS:
    require_tensor(tensor, name, dtypes, {places, padded_rows});
    return;
  case EPX_SCALES_PACKED:
    require_tensor(tensor, name, {EPX_INT32}, {words, padded_rows});
    return;
  case EPX_SCALES_TILES:
    require_tensor(tensor, name, dtypes, {{"ceil(N / 128)", layout.row_tiles()}, words, {"512", 512}});
    return;
  }
  require_tensor(tensor, name, dtypes, {{"N", layout.rows}, places});
}

RowZones require_row_zones(const epx_tensor* counts, const epx_tensor* offsets, int64_t num_rows) {
  require_both_or_neither(counts, "counts", offsets, "offsets");
  if (counts == nullptr) return {num_rows, false, 1, Integers(), Integers()};
  require_tensor(counts, "counts", kInteger, {{"E_l", kAnySize}});
  const int64_t zones = counts->sizes[0];
  if (zones >= std::numeric_limits<int32_t>::max())
    fail(EPX_ERROR_INVALID_ARGUMENT, "counts has {} zones, more than an int32 can count", zones);
  require_tensor(offsets, "offsets", {counts->dtype}, {{"E_l + 1", zones + 1}});
  return {num_rows, true, static_cast<int>(zones), Integers(counts), Integers(offsets)};
}

void validate(const RowZones& zones) {
  if (zones.are_given) validate(Zones{zones.counts, zones.offsets}, zones.num_zones, zones.num_rows);
}

WeightsFormat require_weights_format(const epx_row_format* format) {
  const WireFormat wire = require_format(format);
  const epx_scale_layout layout = format->scale_layout;
  if (is_block128(wire) && layout != EPX_SCALES_ROWS)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "format.scale_layout is {}; with scaling {} the scales of weights have no layouts, so it must be EPX_SCALES_ROWS "
         "(0)",
         static_cast<int>(layout), name_of(wire.scaling));
  if (layout != EPX_SCALES_ROWS && layout != EPX_SCALES_TILES)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "format.scale_layout is {}; the scales of weights lie in EPX_SCALES_ROWS (0) or EPX_SCALES_TILES (3)",
         static_cast<int>(layout));
  return {wire, layout};
}

CheckedWeights require_weights(const WeightTensors& tensors, const WeightsFormat& format, Dim matrices, Dim rows,
                               Dim columns) {
  const auto& [weights, codes, scales, row_scales, transposed_codes, transposed_scales, transposed_row_scales] = tensors;
  require_wanted(codes.tensor, codes.name, transposed_codes.tensor, transposed_codes.name);
  require_both_or_neither(codes.tensor, codes.name, scales.tensor, scales.name);
  require_both_or_neither(transposed_codes.tensor, transposed_codes.name, transposed_scales.tensor, transposed_scales.name);
  for (const NamedTensor& of_nv : {row_scales, transposed_row_scales})
    if (of_nv.tensor != nullptr && !format.wire.has_row_scale())
      fail(EPX_ERROR_INVALID_ARGUMENT, "{} is given; with scaling {} there are none, so it must be NULL", of_nv.name,
           name_of(format.wire.scaling));
  if (is_block128(format.wire)) return {tensors, require_weight_blocks(tensors, format.wire, matrices, rows, columns)};
  return {tensors,
          QuantiseWeightRows{.format = format.wire,
                             .dtype = weights.tensor->dtype,
                             .weights = weights.tensor->data,
                             .num_matrices = matrices.size,
                             .num_rows = rows.size,
                             .num_columns = columns.size,
                             .given = allow_weight_rows(codes, scales, row_scales, format, matrices, rows, columns),
                             .transposed = allow_weight_rows(transposed_codes, transposed_scales, transposed_row_scales,
                                                             format, matrices, columns, rows)}};
}

ParamsTensors::ParamsTensors(const epx_moe_fp8_params& params, const epx_tensor* gate_up_weight,
                             const epx_tensor* down_weight)
    : gate_up{.weights = {gate_up_weight, "gate_up_weight"},
              .codes = {params.gate_up_codes, "fp8_params.gate_up_codes"},
              .scales = {params.gate_up_scales, "fp8_params.gate_up_scales"},
              .row_scales = {},
              .transposed_codes = {params.gate_up_transposed_codes, "fp8_params.gate_up_transposed_codes"},
              .transposed_scales = {params.gate_up_transposed_scales, "fp8_params.gate_up_transposed_scales"},
              .transposed_row_scales = {}},
      down{.weights = {down_weight, "down_weight"},
           .codes = {params.down_codes, "fp8_params.down_codes"},
           .scales = {params.down_scales, "fp8_params.down_scales"},
           .row_scales = {},
           .transposed_codes = {params.down_transposed_codes, "fp8_params.down_transposed_codes"},
           .transposed_scales = {params.down_transposed_scales, "fp8_params.down_transposed_scales"},
           .transposed_row_scales = {}} {}

std::vector<CheckedTranspose> require_transposes(const epx_moe_fp8_params* params) {
  require_struct(params, "fp8_params");
  const auto [gate_up, down] = ParamsTensors(*params, nullptr, nullptr);
  const bool wants_gate_up = is_transposed(gate_up), wants_down = is_transposed(down);
  require_wanted(gate_up.transposed_codes.tensor, gate_up.transposed_codes.name, down.transposed_codes.tensor,
                 down.transposed_codes.name);
  std::vector<CheckedTranspose> checked;
  Dim experts{"E_l", kAnySize}, hidden{"H", kAnySize}, stacked{"2F", kAnySize}; // known once a weight has been checked
  if (wants_down) {
    const epx_tensor* const codes = down.codes.tensor;
    require_tensor(codes, down.codes.name, {EPX_FLOAT8_E4M3}, {experts, hidden, {"F", kAnySize}});
    experts.size = codes->sizes[0];
    hidden.size = require_blocks(*codes, 1, down.codes.name, "H");
    const Dim inner{"F", require_blocks(*codes, 2, down.codes.name, "F")};
    stacked.size = 2 * inner.size;
    checked.push_back(require_transpose(down, experts, hidden, inner));
  }
  if (wants_gate_up) {
    const epx_tensor* const codes = gate_up.codes.tensor;
    require_tensor(codes, gate_up.codes.name, {EPX_FLOAT8_E4M3}, {experts, stacked, hidden});
    experts.size = codes->sizes[0];
    stacked.size = require_blocks(*codes, 1, gate_up.codes.name, "2F", 2 * kQuantiseBlock);
    hidden.size = require_blocks(*codes, 2, gate_up.codes.name, "H");
    checked.push_back(require_transpose(gate_up, experts, stacked, hidden));
  }
  return checked;
}

QuantisedMatrix require_columns(const ColumnTensors& tensors, const WireFormat& format, const RowZones& zones,
                                Dim columns) {
  QuantisedMatrix matrix{};
  matrix.row_format = format;
  matrix.num_rows = zones.num_rows;
  matrix.num_columns = columns.size;
  require_both_or_neither(tensors.codes, tensors.codes_name, tensors.scales, tensors.scales_name);
  allow_tensor(tensors.codes, tensors.codes_name, {EPX_FLOAT8_E4M3}, {columns, {"N", zones.num_rows}});
  allow_tensor(tensors.scales, tensors.scales_name, {EPX_FLOAT32},
               {{"N / 128 + E_l", num_zone_blocks(zones.num_rows, zones.num_zones)}, columns});
  matrix.column_codes = data_of<uint8_t>(tensors.codes);
  matrix.column_scales = data_of<float>(tensors.scales);
  return matrix;
}

QuantisedMatrix require_matrix(const MatrixTensors& tensors, const WireFormat& format, const RowZones& zones, Dim columns) {
  QuantisedMatrix matrix = require_columns({tensors.column_codes, "column_codes", tensors.column_scales, "column_scales"},
                                           format, zones, columns);
  const Dim rows{"N", zones.num_rows};
  require_both_or_neither(tensors.row_codes, "row_codes", tensors.row_scales, "row_scales");
  const epx_scale_layout layout = tensors.format->scale_layout;
  if (tensors.row_codes == nullptr && layout != EPX_SCALES_ROWS)
    fail(EPX_ERROR_INVALID_ARGUMENT, "format.scale_layout is {}, but row_codes is NULL: it must be EPX_SCALES_ROWS (0)",
         static_cast<int>(layout));
  if (tensors.row_codes != nullptr) {
    require_tensor(tensors.row_codes, "row_codes", {EPX_FLOAT8_E4M3}, {rows, columns});
    epx_dtype& scales = matrix.row_format.scales;
    const bool may_be_e8m0 = format.scaling == EPX_SCALING_BLOCK128_POW2;
    if (may_be_e8m0 && (layout == EPX_SCALES_PACKED || tensors.row_scales->dtype == EPX_FLOAT8_E8M0))
      scales = EPX_FLOAT8_E8M0;
    require_scale_layout(matrix.row_format, layout, "format.scale_layout");
    matrix.row_scale_layout = {layout, static_cast<int>(single_element_bytes(scales)), columns.size / kQuantiseBlock,
                               zones.num_rows};
    if (may_be_e8m0)
      require_scales(tensors.row_scales, "row_scales", {EPX_FLOAT32, EPX_FLOAT8_E8M0}, matrix.row_scale_layout);
    else
      require_scales(tensors.row_scales, "row_scales", {EPX_FLOAT32}, matrix.row_scale_layout);
  }
  matrix.row_codes = data_of<uint8_t>(tensors.row_codes);
  matrix.row_scales = data_of<std::byte>(tensors.row_scales);
  return matrix;
}

} // namespace epx::moe
