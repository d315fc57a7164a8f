// SPDX-License-Identifier: Apache-2.0
// What the quantisers' calls are given, checked. These functions throw INVALID_ARGUMENT.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <variant>
#include <vector>

#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/quantise/matrix.h"
#include "moe/quantise/weight_rows.h"
#include "moe/quantise/weights.h"
#include "moe/tensors.h"
#include "runtime/formats/row_format.h"

namespace epx::moe {

// Returns the format of codes with float32 scales.
WireFormat require_block_format(const epx_row_format* format);

// Returns the size of a dimension that blocks cover.
int64_t require_blocks(const epx_tensor& tensor, int axis, const char* name, const char* symbol,
                       int block = kQuantiseBlock);

// How many blocks a dimension has, for the shape of scales.
struct Blocks {
  std::string symbol; // "F / 128"
  int64_t size;

  Dim dim() const { return {symbol.c_str(), size}; } // valid as long as this object lives
};
Blocks blocks_of(Dim dim, int block = kQuantiseBlock);

// Throws when neither output is wanted.
void require_wanted(const epx_tensor* codes, const char* name, const epx_tensor* others, const char* others_name);

// Checks scales of `layout` whose dtype is one of `dtypes`. That of a packed tensor is not.
void require_scales(const epx_tensor* tensor, const char* name, std::initializer_list<epx_dtype> dtypes,
                    const ScaleLayout& layout);

// `counts` and `offsets` may be NULL. Their values are not looked at.
RowZones require_row_zones(const epx_tensor* counts, const epx_tensor* offsets, int64_t num_rows);

// Looks at the values of zones on the host.
void validate(const RowZones& zones);

// The outputs of a call that quantises N rows of `columns` elements. `format` has the layout of row_scales.
struct MatrixTensors {
  const epx_row_format* format;
  const epx_tensor* row_codes;
  const epx_tensor* row_scales;
  const epx_tensor* column_codes;
  const epx_tensor* column_scales;
};
// The outputs of one that quantises its columns alone.
struct ColumnTensors {
  const epx_tensor* codes;
  const char* codes_name;
  const epx_tensor* scales;
  const char* scales_name;
};
// Weights and the outputs of a call that quantises them, which may be NULL. The names are those of the call's args.
struct WeightTensors {
  NamedTensor weights;
  NamedTensor codes, scales, row_scales;
  NamedTensor transposed_codes, transposed_scales, transposed_row_scales;
};
// The two weights of a layer, by their names in fp8_params. Of quantised ones `weights` is empty.
struct ParamsTensors {
  ParamsTensors(const epx_moe_fp8_params& params, const epx_tensor* gate_up_weight, const epx_tensor* down_weight);

  WeightTensors gate_up, down;
};
// They are checked.
struct CheckedWeights {
  WeightTensors tensors;
  std::variant<QuantiseWeights, QuantiseWeightRows> quantise;
};
// How weights are quantised: with a scale for each 128 x 128, or as rows with those of MX and NV.
struct WeightsFormat {
  WireFormat wire;
  epx_scale_layout layout;
};
WeightsFormat require_weights_format(const epx_row_format* format);
// `weights` have been checked, and have these dimensions.
CheckedWeights require_weights(const WeightTensors& tensors, const WeightsFormat& format, Dim matrices, Dim rows,
                               Dim columns);

// Codes and scales of a weight, and those of its transpose. They are checked.
struct CheckedTranspose {
  WeightTensors tensors; // without `weights`
  TransposeWeights transpose;
};
// Of the weights whose transposes are given.
std::vector<CheckedTranspose> require_transposes(const epx_moe_fp8_params* params);

QuantisedMatrix require_columns(const ColumnTensors& tensors, const WireFormat& format, const RowZones& zones, Dim columns);
QuantisedMatrix require_matrix(const MatrixTensors& tensors, const WireFormat& format, const RowZones& zones, Dim columns);

} // namespace epx::moe
