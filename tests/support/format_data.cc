// SPDX-License-Identifier: Apache-2.0
#include "tests/support/format_data.h"

#include <cmath>
#include <span>

#include "base/dtypes.h"
#include "tests/support/check.h"
#include "tests/support/values.h"

namespace epx::test {

namespace {

int64_t rounded_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Tensor scales_tensor(const reference::ReceivedScales& scales, void* data) {
  const int64_t rows = scales.rows, count = scales.num_scales, ld = rounded_up(rows, 4);
  switch (scales.layout) {
  case EPX_SCALES_ROWS:
    return {data, scales.dtype, {rows, count}};
  case EPX_SCALES_COLUMNS:
    return {data, scales.dtype, {count, ld}};
  case EPX_SCALES_PACKED:
    return {data, EPX_INT32, {rounded_up(count, 4) / 4, ld}};
  case EPX_SCALES_TILES:
    return {data, scales.dtype, {rounded_up(rows, 128) / 128, rounded_up(count, 4) / 4, 512}};
  }
  fail_check("no such layout of scales");
}

} // namespace

RowFormat wire_format(const FormatCase& format) {
  if (!format.is_quantised()) return {};
  RowFormat result(format.scaling);
  result.dtype = format.dtype;
  result.amax_floor = format.amax_floor;
  return result;
}

reference::Format reference_format(const FormatCase& format) {
  return {format.scaling, format.dtype, format.scales, format.amax_floor};
}

std::optional<FormatData> make_format_data(const FormatCase& format, int64_t hidden, const std::vector<int64_t>& tokens,
                                           const std::vector<int64_t>& rows, Rng& rng) {
  if (!format.is_quantised()) return std::nullopt;
  FormatData data{reference_format(format), {}, {}, {}, {}, {}};
  const bool is_nv = format.scaling == EPX_SCALING_NV;
  const int64_t num_scales = reference::num_scales(format.scaling, hidden);
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    if (format.way == FormatWay::given) {
      reference::Matrix scales = scribbled_rows(format.scales, tokens[rank], num_scales);
      for (std::byte& byte : scales.bytes)
        byte = static_cast<std::byte>(rng.next());
      data.scales.push_back(std::move(scales));
      if (is_nv) data.row_scales.push_back(random_weights(tokens[rank], rng));
    }
    if (format.has_encode_scale && format.way != FormatWay::given) {
      const float encode =
          std::ldexp(1.0F + static_cast<float>(rng.below(1000)) / 1000.0F, static_cast<int>(rng.between(-4, 12)));
      data.encode_scales.push_back(rng.chance(75) ? std::optional(encode) : std::nullopt);
    }
    if (format.way == FormatWay::on_wire) continue;
    reference::ReceivedScales received{format.layouts[rank % 2], format.scales, rows[rank], num_scales, {}};
    received.bytes.assign(static_cast<size_t>(reference::bytes_of(received)), kScribble);
    data.recv_scales.push_back(std::move(received));
    if (is_nv) data.recv_row_scales.push_back(scribbled_weights(rows[rank]));
  }
  return data;
}

RowFormat format_of(CallBuffers& buffers, const FormatData& data, size_t rank) {
  RowFormat format(data.format.scaling);
  format.dtype = data.format.dtype;
  format.amax_floor = data.format.amax_floor;
  const auto floats_in = [&](const char* name, std::span<const float> values) -> ConstTensor {
    return {buffers.input(name, std::as_bytes(values), sizeof(float)), EPX_FLOAT32, static_cast<int64_t>(values.size())};
  };
  if (!data.scales.empty()) {
    const reference::Matrix& scales = data.scales[rank];
    format.scales = {buffers.input("scales", scales.bytes, static_cast<size_t>(single_element_bytes(scales.dtype))),
                     scales.dtype,
                     {scales.rows, scales.cols}};
  }
  if (!data.row_scales.empty()) format.row_scales = floats_in("row_scales", data.row_scales[rank]);
  if (!data.encode_scales.empty() && data.encode_scales[rank])
    format.encode_scale = floats_in("encode_scale", std::span(&*data.encode_scales[rank], 1));
  if (!data.recv_scales.empty()) {
    const reference::ReceivedScales& scales = data.recv_scales[rank];
    format.scale_layout = scales.layout;
    const epx_dtype dtype = scales.layout == EPX_SCALES_PACKED ? EPX_INT32 : scales.dtype;
    format.recv_scales = scales_tensor(
        scales, buffers.output("recv_scales", scales.bytes.size(), static_cast<size_t>(single_element_bytes(dtype))));
  }
  if (!data.recv_row_scales.empty()) {
    const auto rows = data.recv_row_scales[rank].size();
    format.recv_row_scales = {buffers.output("recv_row_scales", rows * sizeof(float), sizeof(float)), EPX_FLOAT32,
                              static_cast<int64_t>(rows)};
  }
  return format;
}

} // namespace epx::test
