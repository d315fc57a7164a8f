// SPDX-License-Identifier: Apache-2.0
// The quantisers' part of the C API.
#include <initializer_list>
#include <limits>

#include "base/c_boundary.h"
#include "base/dtypes.h"
#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/ffn/ffn.h"
#include "moe/quantise/cuda/enqueue.h"
#include "moe/quantise/rows.h"
#include "moe/quantise/weights.h"
#include "moe/tensors.h"
#include "runtime/formats/format_arguments.h"

using namespace epx;
using namespace epx::moe;

namespace {

// The format of codes with float32 scales.
WireFormat require_format(const epx_row_format* format) {
  if (format == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "format is NULL; it is required");
  require_no_tensors(*format, "format", "the call has its tensors in args");
  WireFormat wire = check_format(*format, "format");
  if (wire.scaling != EPX_SCALING_BLOCK128 && wire.scaling != EPX_SCALING_BLOCK128_POW2)
    fail(EPX_ERROR_INVALID_ARGUMENT, "format.scaling is {}; it must be block128 or block128_pow2", name_of(wire.scaling));
  wire.scales = EPX_FLOAT32;
  return wire;
}

// Returns the size of a dimension that blocks cover.
int64_t require_blocks(const epx_tensor& tensor, int axis, const char* name, const char* symbol) {
  const int64_t size = tensor.sizes[axis];
  if (size == 0 || size % kQuantiseBlock != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has {} = {}; it must be a multiple of {}, and not 0", name, symbol, size,
         kQuantiseBlock);
  return size;
}

// Throws when neither output is wanted.
void require_wanted(const epx_tensor* codes, const char* name, const epx_tensor* others, const char* others_name) {
  if (codes == nullptr && others == nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} and {} are NULL; one of them at least must be wanted", name, others_name);
}

// Checks scales of `layout` whose dtype is one of `dtypes`. That of a packed tensor is not.
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

// The scales of rows that are E4M3, which lie as those of BLOCK128 can, whatever their scaling was.
void require_scales_of_rows(const epx_moe_quantise_rows_args& args, QuantiseRows& call) {
  const bool has_scales = call.dtype == EPX_FLOAT8_E4M3;
  if (!has_scales && args.scales != nullptr)
    fail(EPX_ERROR_INVALID_ARGUMENT, "scales is given, but rows are {}; it must be NULL unless they are float8_e4m3",
         name_of(call.dtype));
  if (!has_scales && args.scale_layout != EPX_SCALES_ROWS)
    fail(EPX_ERROR_INVALID_ARGUMENT, "scale_layout is {}, but rows are {}; without scales it must be EPX_SCALES_ROWS (0)",
         static_cast<int>(args.scale_layout), name_of(call.dtype));
  if (!has_scales) return;
  require_scale_layout({EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0f}, args.scale_layout, "scale_layout");
  call.scale_layout = {args.scale_layout, sizeof(float), call.hidden / kQuantiseBlock, call.num_rows};
  require_scales(args.scales, "scales", {EPX_FLOAT32}, call.scale_layout);
  call.scales = data_of<const float>(args.scales);
}

void require_zones(const epx_moe_quantise_rows_args& args, QuantiseRows& call) {
  require_both_or_neither(args.counts, "counts", args.offsets, "offsets");
  call.has_zones = args.counts != nullptr;
  call.num_zones = 1;
  if (!call.has_zones) return;
  require_tensor(args.counts, "counts", kInteger, {{"E_l", kAnySize}});
  const int64_t zones = args.counts->sizes[0];
  if (zones >= std::numeric_limits<int32_t>::max())
    fail(EPX_ERROR_INVALID_ARGUMENT, "counts has {} zones, more than an int32 can count", zones);
  require_tensor(args.offsets, "offsets", {args.counts->dtype}, {{"E_l + 1", zones + 1}});
  call.num_zones = static_cast<int>(zones);
  call.counts = Integers(args.counts);
  call.offsets = Integers(args.offsets);
}

void require_row_outputs(const epx_moe_quantise_rows_args& args, QuantiseRows& call) {
  require_both_or_neither(args.row_codes, "row_codes", args.row_scales, "row_scales");
  if (args.row_codes == nullptr && args.format->scale_layout != EPX_SCALES_ROWS)
    fail(EPX_ERROR_INVALID_ARGUMENT, "format.scale_layout is {}, but row_codes is NULL: it must be EPX_SCALES_ROWS (0)",
         static_cast<int>(args.format->scale_layout));
  if (args.row_codes == nullptr) return;
  require_tensor(args.row_codes, "row_codes", {EPX_FLOAT8_E4M3}, {{"N", call.num_rows}, {"H", call.hidden}});
  WireFormat& format = call.row_format;
  const epx_scale_layout layout = args.format->scale_layout;
  const bool may_be_e8m0 = format.scaling == EPX_SCALING_BLOCK128_POW2;
  if (may_be_e8m0 && (layout == EPX_SCALES_PACKED || args.row_scales->dtype == EPX_FLOAT8_E8M0))
    format.scales = EPX_FLOAT8_E8M0;
  require_scale_layout(format, layout, "format.scale_layout");
  call.row_scale_layout = {layout, static_cast<int>(single_element_bytes(format.scales)), call.hidden / kQuantiseBlock,
                           call.num_rows};
  if (may_be_e8m0)
    require_scales(args.row_scales, "row_scales", {EPX_FLOAT32, EPX_FLOAT8_E8M0}, call.row_scale_layout);
  else
    require_scales(args.row_scales, "row_scales", {EPX_FLOAT32}, call.row_scale_layout);
  call.row_codes = data_of<uint8_t>(args.row_codes);
  call.row_scales = data_of<std::byte>(args.row_scales);
}

void require_column_outputs(const epx_moe_quantise_rows_args& args, QuantiseRows& call) {
  require_both_or_neither(args.column_codes, "column_codes", args.column_scales, "column_scales");
  if (args.column_codes == nullptr) return;
  require_tensor(args.column_codes, "column_codes", {EPX_FLOAT8_E4M3}, {{"H", call.hidden}, {"N", call.num_rows}});
  require_tensor(args.column_scales, "column_scales", {EPX_FLOAT32},
                 {{"N / 128 + E_l", num_zone_blocks(call.num_rows, call.num_zones)}, {"H", call.hidden}});
  call.column_codes = data_of<uint8_t>(args.column_codes);
  call.column_scales = data_of<float>(args.column_scales);
}

} // namespace

epx_status epx_moe_quantise_rows(const epx_moe_quantise_rows_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    QuantiseRows call{};
    call.row_format = require_format(args->format);
    if (args->reserved0 != 0) fail(EPX_ERROR_INVALID_ARGUMENT, "reserved0 is {}; it must be 0", args->reserved0);
    require_tensor(args->rows, "rows", {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16, EPX_FLOAT8_E4M3},
                   {{"N", kAnySize}, {"H", kAnySize}});
    call.dtype = args->rows->dtype;
    call.rows = args->rows->data;
    call.num_rows = args->rows->sizes[0];
    call.hidden = require_blocks(*args->rows, 1, "rows", "H");
    require_scales_of_rows(*args, call);
    require_zones(*args, call);
    require_wanted(args->row_codes, "row_codes", args->column_codes, "column_codes");
    require_row_outputs(*args, call);
    require_column_outputs(*args, call);
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { cuda::enqueue(*args, call); });
    if (call.has_zones) validate(Zones{call.counts, call.offsets}, call.num_zones, call.num_rows);
    quantise(call);
  });
}

epx_status epx_moe_quantise_weights(const epx_moe_quantise_weights_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    QuantiseWeights call{};
    call.format = require_format(args->format);
    if (args->format->scale_layout != EPX_SCALES_ROWS)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "format.scale_layout is {}; the scales of weights have none, so it must be "
           "EPX_SCALES_ROWS (0)",
           static_cast<int>(args->format->scale_layout));
    require_tensor(args->weights, "weights", {EPX_FLOAT32, EPX_BFLOAT16},
                   {{"E_l", kAnySize}, {"R", kAnySize}, {"C", kAnySize}});
    call.dtype = args->weights->dtype;
    call.weights = args->weights->data;
    call.num_matrices = args->weights->sizes[0];
    call.num_rows = require_blocks(*args->weights, 1, "weights", "R");
    call.num_columns = require_blocks(*args->weights, 2, "weights", "C");
    require_wanted(args->codes, "codes", args->transposed_codes, "transposed_codes");
    require_both_or_neither(args->codes, "codes", args->scales, "scales");
    require_both_or_neither(args->transposed_codes, "transposed_codes", args->transposed_scales, "transposed_scales");
    const Dim matrices{"E_l", call.num_matrices};
    const Dim rows{"R", call.num_rows};
    const Dim columns{"C", call.num_columns};
    const Dim row_blocks{"R / 128", call.num_rows / kQuantiseBlock};
    const Dim column_blocks{"C / 128", call.num_columns / kQuantiseBlock};
    allow_tensor(args->codes, "codes", {EPX_FLOAT8_E4M3}, {matrices, rows, columns});
    allow_tensor(args->scales, "scales", {EPX_FLOAT32}, {matrices, row_blocks, column_blocks});
    allow_tensor(args->transposed_codes, "transposed_codes", {EPX_FLOAT8_E4M3}, {matrices, columns, rows});
    allow_tensor(args->transposed_scales, "transposed_scales", {EPX_FLOAT32}, {matrices, column_blocks, row_blocks});
    call.codes = data_of<uint8_t>(args->codes);
    call.scales = data_of<float>(args->scales);
    call.transposed_codes = data_of<uint8_t>(args->transposed_codes);
    call.transposed_scales = data_of<float>(args->transposed_scales);
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { cuda::enqueue(*args, call); });
    quantise(call);
  });
}
