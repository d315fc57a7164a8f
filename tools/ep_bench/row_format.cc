// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/row_format.h"

#include <fmt/format.h>

#include "base/dtypes.h"

namespace epx::bench {
namespace {

// The scales of FP8 rows by powers of two are float32, as DeepGEMM takes them on Hopper. They are E8M0 where the layout of
// scales demands it, and where nobody but the library sees them.
bool has_short_scales(const Options& options) {
  return options.wire_format != NamedFormat::None || options.scale_layout == EPX_SCALES_PACKED ||
         options.scale_layout == EPX_SCALES_TILES;
}

QuantisedRow quantised_row(NamedFormat named, bool has_short_scales) {
  const RowFormat format = epx::row_format(named);
  switch (format.scaling) {
  case EPX_SCALING_NONE:
  case EPX_SCALING_BLOCK128:
    break;
  case EPX_SCALING_BLOCK128_POW2:
    return {format.scaling, format.dtype, has_short_scales ? EPX_FLOAT8_E8M0 : EPX_FLOAT32};
  case EPX_SCALING_MX:
    return {format.scaling, format.dtype, EPX_FLOAT8_E8M0};
  case EPX_SCALING_NV:
    return {format.scaling, format.dtype, EPX_FLOAT8_E4M3};
  }
  return {format.scaling, format.dtype, EPX_FLOAT32};
}

int64_t bytes_of(const QuantisedRow& row, int64_t hidden) {
  return epx::row_bytes(row.elements, hidden) + epx::row_bytes(row.scales, RowFormat(row.scaling).num_scales(hidden)) +
         (row.has_row_scale() ? static_cast<int64_t>(sizeof(float)) : 0);
}

} // namespace

std::array<std::pair<const char*, NamedFormat>, 3> named_formats(const Options& options) {
  return {
      {{"--row-format", options.row_format}, {"--wire-format", options.wire_format}, {"--sum-format", options.sum_format}}};
}

QuantisedRow quantised_row(const Options& options) {
  return quantised_row(options.format(), has_short_scales(options));
}

QuantisedRow quantised_sum(const Options& options) {
  return quantised_row(options.sum_format, true); // nobody but the library sees its scales
}

RowFormat row_format(const Options& options) {
  RowFormat format = epx::row_format(options.format());
  format.scale_layout = options.scale_layout;
  return format;
}

epx_dtype tokens_dtype(const Options& options) {
  return options.has_quantised_input ? quantised_row(options).elements : options.dtype;
}

epx_dtype recv_tokens_dtype(const Options& options) {
  return options.row_format != NamedFormat::None ? quantised_row(options).elements : options.dtype;
}

int64_t recv_scales_bytes(const Options& options, int64_t rows) {
  if (options.row_format == NamedFormat::None) return 0;
  const int64_t elements = row_format(options).recv_scales_shape(rows, options.hidden).num_elements();
  return elements *
         single_element_bytes(options.scale_layout == EPX_SCALES_PACKED ? EPX_INT32 : quantised_row(options).scales);
}

RowBytes row_bytes_of(const Options& options, epx_operation operation) {
  const int64_t wide = row_bytes(options);
  const bool adds_up = operation == EPX_OP_COMBINE || operation == EPX_OP_DISPATCH_BWD;
  if (adds_up && options.sum_format != NamedFormat::None)
    return {wide, bytes_of(quantised_sum(options), options.hidden), wide};
  if (operation != EPX_OP_DISPATCH || options.format() == NamedFormat::None) return {wide, wide, wide};
  const int64_t quantised = bytes_of(quantised_row(options), options.hidden);
  return {options.has_quantised_input ? quantised : wide, quantised,
          options.row_format != NamedFormat::None ? quantised : wide};
}

std::string row_format_text(const Options& options) {
  if (options.format() == NamedFormat::None) return {};
  const char* const name = to_string(options.format());
  if (options.wire_format != NamedFormat::None) return fmt::format("{} on the wire alone", name);
  return fmt::format("{}, quantised {}, scales in {}", name,
                     options.has_quantised_input ? "before the call" : "in the call", to_string(options.scale_layout));
}

} // namespace epx::bench
