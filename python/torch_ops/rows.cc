// SPDX-License-Identifier: Apache-2.0
#include "rows.h"

namespace epx_torch {
namespace {

enum Field : size_t { kScaling, kDtype, kScaleDtype, kScaleLayout, kWireOnly, kNumFields };

int32_t field(const std::vector<int64_t>& fields, Field which) {
  return to_int32("a field of format", fields[which]);
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

// A new tensor as the C API has scales, to which rows of all ranks, [P, M, ...], are rows of one matrix.
epx::Tensor scales_of_new(const Tensor& tensor, size_t num_leading) {
  epx_tensor view = view_of_new(tensor);
  if (num_leading == 2) {
    view.sizes[0] *= view.sizes[1];
    std::ranges::copy(view.sizes + 2, view.sizes + view.ndim, view.sizes + 1);
    --view.ndim;
  }
  return epx::Tensor(view);
}

} // namespace

Rows new_rows(const Group& group, const Tensor& tokens, std::span<const int64_t> lead) {
  const epx_tensor sent = view_tokens(tokens, group);
  const Tensor recv_tokens = new_tensor(group.place, joined(lead, tokens.size(1)), tokens.scalar_type());
  return {sent, recv_tokens, view_of_new(recv_tokens)};
}

Tensor attach(const Group& group, Rows& rows, const std::optional<Tensor>& sidecar) {
  if (!sidecar) return nothing(group);
  Tensor recv_sidecar = new_recv_sidecar(group, rows.received, *sidecar);
  attach_sidecar(group, rows.sent, *sidecar, rows.received, recv_sidecar);
  return recv_sidecar;
}

epx::RowFormat format_of(const std::vector<int64_t>& fields, double amax_floor) {
  epx::RowFormat format;
  if (fields.empty()) return format;
  if (fields.size() != kNumFields) refuse("format has ", fields.size(), " fields; it must have ", size_t{kNumFields});
  format.scaling = static_cast<epx_scaling>(field(fields, kScaling));
  format.dtype = static_cast<epx_dtype>(field(fields, kDtype));
  format.amax_floor = static_cast<float>(amax_floor);
  format.scale_layout = static_cast<epx_scale_layout>(field(fields, kScaleLayout));
  return format;
}

FormatRows::FormatRows(const Group& group, const Tensor& tokens, std::span<const int64_t> lead, const FormatInputs& inputs)
    : Rows{{}, nothing(group), {}}, recv_scales(nothing(group)), recv_row_scales(nothing(group)),
      format_(format_of(inputs.fields, inputs.amax_floor)) {
  if (!format_) refuse("format has no scaling");
  const ScalarType elements = scalar_type("format", format_.dtype);
  const ScalarType scale_dtype = scalar_type("format", static_cast<epx_dtype>(field(inputs.fields, kScaleDtype)));

  sent = inputs.scales ? view("tokens", tokens, group.place, {kAnySize, kAnySize}, {elements})
                       : view_rows("tokens", tokens, group);
  const int64_t hidden = sent.sizes[1], per_byte = format_.dtype == EPX_FLOAT4_E2M1 ? 2 : 1;
  if (hidden % per_byte != 0)
    refuse("rows have H = ", hidden, "; it must be even, since a byte has two elements of float4_e2m1fn");
  view_scales(group, inputs, scale_dtype);
  if (field(inputs.fields, kWireOnly) != 0) {
    recv_tokens = new_tensor(group.place, joined(lead, hidden), tokens.scalar_type());
  } else {
    recv_tokens = new_tensor(group.place, joined(lead, hidden / per_byte), elements);
    make_recv_scales(group, lead, scale_dtype);
  }
  received = view_of_new(recv_tokens);
  c_format_ = format_.get();
}

void FormatRows::view_scales(const Group& group, const FormatInputs& inputs, ScalarType scale_dtype) {
  const int64_t num_tokens = sent.sizes[0];
  if (inputs.scales)
    format_.scales = epx::ConstTensor(
        view("scales", *inputs.scales, group.place, {num_tokens, format_.num_scales(sent.sizes[1])}, {scale_dtype}));
  if (inputs.row_scales)
    format_.row_scales = epx::ConstTensor(view_weights("row_scales", *inputs.row_scales, group, num_tokens));
  if (inputs.encode_scale)
    format_.encode_scale = epx::ConstTensor(view_weights("encode_scale", *inputs.encode_scale, group, 1));
}

void FormatRows::make_recv_scales(const Group& group, std::span<const int64_t> lead, ScalarType scale_dtype) {
  const int64_t hidden = sent.sizes[1];
  if (format_.scale_layout == EPX_SCALES_ROWS) {
    recv_scales = new_tensor(group.place, joined(lead, format_.num_scales(hidden)), scale_dtype);
    format_.recv_scales = scales_of_new(recv_scales, lead.size());
  } else {
    const epx::Shape shape = format_.recv_scales_shape(product(lead), hidden);
    recv_scales =
        new_tensor(group.place, shape.sizes(), format_.scale_layout == EPX_SCALES_PACKED ? ScalarType::Int : scale_dtype);
    format_.recv_scales = scales_of_new(recv_scales, 1);
  }
  if (format_.scaling == EPX_SCALING_NV) {
    recv_row_scales = new_tensor(group.place, lead, ScalarType::Float);
    format_.recv_row_scales = scales_of_new(recv_row_scales, lead.size());
  }
}

} // namespace epx_torch
