// SPDX-License-Identifier: Apache-2.0
#include "row_format.h"

#include <epx/epx.hpp>

namespace epx_torch {
namespace {

enum Field : size_t { kScaling, kDtype, kScaleDtype, kScaleLayout, kWireOnly, kNumFields };

// Rows of all ranks are rows of one matrix to the C API.
epx_tensor flattened(const epx_tensor& tensor, int64_t num_rows) {
  epx_tensor result = tensor;
  result.ndim = tensor.ndim - 1;
  result.sizes[0] = num_rows;
  std::ranges::copy(tensor.sizes + 2, tensor.sizes + tensor.ndim, result.sizes + 1);
  return result;
}

int64_t product(std::span<const int64_t> sizes) {
  int64_t result = 1;
  for (const int64_t size : sizes)
    result *= size;
  return result;
}

std::vector<int64_t> joined(std::span<const int64_t> lead, int64_t last) {
  std::vector<int64_t> shape(lead.begin(), lead.end());
  shape.push_back(last);
  return shape;
}

epx::RowFormat shapes_of(const epx_row_format& format) {
  epx::RowFormat shapes;
  shapes.scaling = format.scaling;
  shapes.scale_layout = format.scale_layout;
  return shapes;
}

} // namespace

FormatRows::FormatRows(const Group& group, const Tensor& tokens, std::span<const int64_t> lead, const FormatInputs& inputs)
    : Rows{{}, nothing(group), {}}, recv_scales(nothing(group)), recv_row_scales(nothing(group)) {
  if (inputs.fields.size() != kNumFields)
    refuse("format has ", inputs.fields.size(), " fields; it must have ", size_t{kNumFields});
  const auto field = [&inputs](Field which) { return to_int32("a field of format", inputs.fields[which]); };
  format_.struct_size = sizeof(format_);
  format_.scaling = static_cast<epx_scaling>(field(kScaling));
  format_.dtype = static_cast<epx_dtype>(field(kDtype));
  format_.amax_floor = static_cast<float>(inputs.amax_floor);
  format_.scale_layout = static_cast<epx_scale_layout>(field(kScaleLayout));
  const ScalarType elements = scalar_type("format", format_.dtype);
  const bool is_quantised = inputs.scales.has_value(), wire_only = field(kWireOnly) != 0;

  sent = is_quantised ? view("tokens", tokens, group.place, {kAnySize, kAnySize}, {elements})
                      : view_rows("tokens", tokens, group);
  const int64_t per_byte = format_.dtype == EPX_FLOAT4_E2M1 ? 2 : 1;
  if (sent.sizes[1] % per_byte != 0)
    refuse("tokens has H = ", sent.sizes[1], "; it must be even, since a byte has two elements of float4_e2m1fn");
  if (wire_only) {
    recv_tokens = new_tensor(group.place, joined(lead, sent.sizes[1]), tokens.scalar_type());
  } else {
    recv_tokens = new_tensor(group.place, joined(lead, sent.sizes[1] / per_byte), elements);
    make_recv_scales(group, lead, static_cast<epx_dtype>(field(kScaleDtype)));
  }
  received = view_of_new(recv_tokens);
  view_scales(group, inputs);
}

void FormatRows::view_scales(const Group& group, const FormatInputs& inputs) {
  const int64_t num_tokens = sent.sizes[0];
  if (inputs.scales) {
    const ScalarType type = scalar_type("format", static_cast<epx_dtype>(inputs.fields[kScaleDtype]));
    scales_ =
        view("scales", *inputs.scales, group.place, {num_tokens, shapes_of(format_).num_scales(sent.sizes[1])}, {type});
    format_.scales = &scales_;
  }
  if (inputs.row_scales) {
    row_scales_ = view_weights("row_scales", *inputs.row_scales, group, num_tokens);
    format_.row_scales = &row_scales_;
  }
  if (inputs.encode_scale) {
    encode_scale_ = view_weights("encode_scale", *inputs.encode_scale, group, 1);
    format_.encode_scale = &encode_scale_;
  }
}

void FormatRows::make_recv_scales(const Group& group, std::span<const int64_t> lead, epx_dtype dtype) {
  const int64_t num_rows = product(lead), hidden = sent.sizes[1];
  const bool by_row = format_.scale_layout == EPX_SCALES_ROWS, is_packed = format_.scale_layout == EPX_SCALES_PACKED;
  const epx::RowFormat shapes = shapes_of(format_);
  const epx::Shape shape = shapes.recv_scales_shape(num_rows, hidden);
  const std::span<const int64_t> sizes = shape.sizes();
  recv_scales =
      new_tensor(group.place, by_row ? joined(lead, shapes.num_scales(hidden)) : std::vector(sizes.begin(), sizes.end()),
                 is_packed ? ScalarType::Int : scalar_type("format", dtype));
  recv_scales_ = view_of_new(recv_scales);
  if (by_row && lead.size() == 2) recv_scales_ = flattened(recv_scales_, num_rows);
  format_.recv_scales = &recv_scales_;
  if (format_.scaling == EPX_SCALING_NV) {
    recv_row_scales = new_tensor(group.place, std::vector(lead.begin(), lead.end()), ScalarType::Float);
    recv_row_scales_ = view_of_new(recv_row_scales);
    if (lead.size() == 2) recv_row_scales_ = flattened(recv_row_scales_, num_rows);
    format_.recv_row_scales = &recv_row_scales_;
  }
}

} // namespace epx_torch
