// SPDX-License-Identifier: Apache-2.0
// What the quantisers' calls are given, checked. These functions throw INVALID_ARGUMENT.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "epx/epx_moe.h"
#include "moe/quantise/matrix.h"
#include "moe/tensors.h"
#include "runtime/formats/row_format.h"

namespace epx::moe {

// Returns the format of codes with float32 scales.
WireFormat require_block_format(const epx_row_format* format);

// Returns the size of a dimension that blocks cover.
int64_t require_blocks(const epx_tensor& tensor, int axis, const char* name, const char* symbol);

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
QuantisedMatrix require_columns(const ColumnTensors& tensors, const WireFormat& format, const RowZones& zones, Dim columns);
QuantisedMatrix require_matrix(const MatrixTensors& tensors, const WireFormat& format, const RowZones& zones, Dim columns);

} // namespace epx::moe
