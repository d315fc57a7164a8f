// SPDX-License-Identifier: Apache-2.0
#include "runtime/reference/formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "base/dtypes.h"

namespace epx::reference {
namespace {

void require_format(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// ---- Elements ----------------------------------------------------------------------------------------------------------

// A type of 8 or 4 bits. Its first codes are the finite numbers that are not negative, in ascending order.
struct Type {
  int mantissa_bits;
  int bias;
  int num_finite;
  int sign; // bit
};
constexpr Type kE4M3{3, 7, 0x7F, 0x80};
constexpr Type kE5M2{2, 15, 0x7C, 0x80};
constexpr Type kE2M1{1, 1, 8, 8};
constexpr int kNan = 0x7F; // of E4M3 and of E5M2
constexpr int kInfinity = 0x7C;
constexpr int kE8M0Nan = 0xFF;

const Type& type_of(epx_dtype dtype) {
  switch (dtype) {
  case EPX_FLOAT8_E4M3:
    return kE4M3;
  case EPX_FLOAT8_E5M2:
    return kE5M2;
  case EPX_FLOAT4_E2M1:
    return kE2M1;
  default:
    throw std::invalid_argument("not a dtype of quantised elements");
  }
}

// The number that a code without its sign stands for.
double magnitude(const Type& type, int code) {
  const int field = code >> type.mantissa_bits;
  const int fraction = code & ((1 << type.mantissa_bits) - 1);
  const int implicit = field == 0 ? 0 : 1 << type.mantissa_bits;
  return std::ldexp(implicit + fraction, std::max(field, 1) - type.bias - type.mantissa_bits);
}

// The finite numbers that are not negative, by code. nearest() compares each element with several.
const std::vector<double>& magnitudes(epx_dtype dtype) {
  const auto of = [](const Type& type) {
    std::vector<double> numbers;
    numbers.reserve(type.num_finite);
    for (int code = 0; code < type.num_finite; ++code)
      numbers.push_back(magnitude(type, code));
    return numbers;
  };
  static const std::vector<double> kOfE4M3 = of(kE4M3), kOfE5M2 = of(kE5M2), kOfE2M1 = of(kE2M1);
  return dtype == EPX_FLOAT8_E4M3 ? kOfE4M3 : dtype == EPX_FLOAT8_E5M2 ? kOfE5M2 : kOfE2M1;
}

float value_of(epx_dtype dtype, int code) {
  if (dtype == EPX_FLOAT8_E8M0)
    return code == kE8M0Nan ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(std::ldexp(1.0, code - 127));
  const Type& type = type_of(dtype);
  const int unsigned_code = code & (type.sign - 1);
  double value = magnitude(type, unsigned_code);
  if (unsigned_code >= type.num_finite)
    value = dtype == EPX_FLOAT8_E5M2 && unsigned_code == kInfinity ? HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  return static_cast<float>((code & type.sign) != 0 ? -value : value);
}

// The code of the number that is nearest to `value`, which is no NaN: of two, the even code. The largest stands for all that are
// larger.
int nearest(epx_dtype dtype, float value) {
  const std::vector<double>& numbers = magnitudes(dtype);
  const double wanted = std::fabs(static_cast<double>(value));
  // The last number that is not above `wanted`, and what follows it.
  auto code = static_cast<size_t>(std::ranges::upper_bound(numbers, wanted) - numbers.begin()) - 1;
  if (code + 1 < numbers.size()) {
    const double half_way = (numbers[code] + numbers[code + 1]) / 2; // exact
    if (wanted > half_way || (wanted == half_way && code % 2 != 0)) ++code;
  }
  return static_cast<int>(code) | (std::signbit(value) ? type_of(dtype).sign : 0);
}

// The code of an element that has no number.
int not_a_number(epx_dtype dtype, float element) {
  if (dtype == EPX_FLOAT4_E2M1) return 0; // its scale tells
  if (dtype == EPX_FLOAT8_E5M2 && std::isinf(element)) return kInfinity | (std::signbit(element) ? kE5M2.sign : 0);
  return kNan;
}

std::byte& byte_at(Matrix& matrix, int64_t row, int64_t byte) {
  return matrix.bytes[row * epx::row_bytes(matrix.dtype, matrix.cols) + byte];
}
int byte_at(const Matrix& matrix, int64_t row, int64_t byte) {
  return std::to_integer<int>(matrix.bytes[row * epx::row_bytes(matrix.dtype, matrix.cols) + byte]);
}

int code_at(const Matrix& elements, int64_t row, int64_t h) {
  if (elements.dtype != EPX_FLOAT4_E2M1) return byte_at(elements, row, h);
  return byte_at(elements, row, h / 2) >> (h % 2 * 4) & 0xF;
}

void set_code(Matrix& elements, int64_t row, int64_t h, int code) {
  if (elements.dtype == EPX_FLOAT4_E2M1)
    byte_at(elements, row, h / 2) |= static_cast<std::byte>(code << (h % 2 * 4));
  else
    byte_at(elements, row, h) = static_cast<std::byte>(code);
}

Matrix zeros(epx_dtype dtype, int64_t rows, int64_t cols) {
  return {dtype, rows, cols, std::vector<std::byte>(static_cast<size_t>(rows * epx::row_bytes(dtype, cols)))};
}

// ---- Scales ------------------------------------------------------------------------------------------------------------

int block_of(epx_scaling scaling) {
  switch (scaling) {
  case EPX_SCALING_BLOCK128:
  case EPX_SCALING_BLOCK128_POW2:
    return 128;
  case EPX_SCALING_MX:
    return 32;
  case EPX_SCALING_NV:
    return 16;
  default:
    throw std::invalid_argument("not a scaling");
  }
}

// The exponent of the least power of two that is not below a positive number.
int exponent_above(float value) {
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent); // in [0.5, 1)
  return fraction == 0.5F ? exponent - 1 : exponent;
}

// The scale of a block as it is stored, and the number by which elements are multiplied or divided before they are rounded.
struct Scale {
  epx_dtype dtype;
  int code = 0;       // of one byte
  float value = 0.0F; // of FLOAT32
  float factor = 0.0F;
  bool divides = false;
};

Scale block128_scale(const Format& format, float amax) {
  const float a = std::max(amax, format.amax_floor);
  Scale scale{EPX_FLOAT32};
  scale.value = a == 0.0F ? 1.0F : a / 448.0F;
  scale.factor = std::min(1.0F / scale.value, std::numeric_limits<float>::max());
  return scale;
}

Scale pow2_scale(const Format& format, float amax) {
  const float a = std::max(amax, format.amax_floor);
  const float quotient = a / 448.0F;
  // The quotient of the smallest numbers is 0, whose logarithm is below all exponents.
  const int exponent = a == 0.0F ? 0 : quotient == 0.0F ? -126 : std::clamp(exponent_above(quotient), -126, 127);
  Scale scale{format.scales, exponent + 127, std::ldexp(1.0F, exponent)};
  scale.factor = scale.value;
  scale.divides = true;
  return scale;
}

Scale mx_scale(const Format& format, float amax) {
  const float product = amax * (format.dtype == EPX_FLOAT8_E5M2 ? 1.0F / 57344.0F : 1.0F / 448.0F);
  Scale scale{EPX_FLOAT8_E8M0};
  scale.code = product == 0.0F ? 0 : std::max(exponent_above(product) + 127, 0);
  scale.factor = std::ldexp(1.0F, 127 - scale.code);
  return scale;
}

Scale nv_scale(float encode_scale, float amax) {
  Scale scale{EPX_FLOAT8_E4M3};
  const float sixth = 1.0F / 6.0F;
  scale.code = nearest(EPX_FLOAT8_E4M3, amax * (encode_scale * sixth));
  const float value = value_of(EPX_FLOAT8_E4M3, scale.code);
  scale.factor = value == 0.0F ? 0.0F : std::min(encode_scale / value, std::numeric_limits<float>::max());
  return scale;
}

Scale scale_of(const Format& format, float amax, float encode_scale) {
  switch (format.scaling) {
  case EPX_SCALING_BLOCK128:
    return block128_scale(format, amax);
  case EPX_SCALING_BLOCK128_POW2:
    return pow2_scale(format, amax);
  case EPX_SCALING_MX:
    return mx_scale(format, amax);
  default:
    return nv_scale(encode_scale, amax);
  }
}

// The largest magnitude of the finite elements from `begin` on, below `end`.
float amax_of(const Matrix& rows, int64_t row, int64_t begin, int64_t end) {
  float amax = 0.0F;
  for (int64_t h = begin; h < end; ++h)
    if (const float x = load(rows, row, h); std::isfinite(x)) amax = std::max(amax, std::fabs(x));
  return amax;
}

float encode_scale_of(float row_amax) {
  return row_amax == 0.0F ? 1.0F : std::min(2688.0F / row_amax, std::numeric_limits<float>::max());
}

void quantise_block(const Format& format, const Matrix& rows, int64_t row, int64_t block, float encode_scale,
                    QuantisedRows& to) {
  const int64_t begin = block * block_of(format.scaling);
  const int64_t end = std::min(begin + block_of(format.scaling), rows.cols);
  Scale scale = scale_of(format, amax_of(rows, row, begin, end), encode_scale);
  bool is_finite = true;
  for (int64_t h = begin; h < end; ++h)
    is_finite = is_finite && std::isfinite(load(rows, row, h));
  const bool is_lost = !is_finite && format.dtype == EPX_FLOAT4_E2M1;
  if (is_lost) scale.code = kNan;
  for (int64_t h = begin; h < end; ++h) {
    const float x = load(rows, row, h);
    if (!std::isfinite(x))
      set_code(to.elements, row, h, not_a_number(format.dtype, x));
    else if (is_lost || scale.factor == 0.0F)
      set_code(to.elements, row, h, 0);
    else
      set_code(to.elements, row, h, nearest(format.dtype, scale.divides ? x / scale.factor : x * scale.factor));
  }
  if (scale.dtype == EPX_FLOAT32)
    store(to.scales, row, block, scale.value);
  else
    byte_at(to.scales, row, block) = static_cast<std::byte>(scale.code);
}

float scale_at(const Matrix& scales, int64_t row, int64_t block) {
  return scales.dtype == EPX_FLOAT32 ? load(scales, row, block) : value_of(scales.dtype, byte_at(scales, row, block));
}

// ---- Layouts -----------------------------------------------------------------------------------------------------------

int64_t rounded_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The scales that the layout has of a row: S, and what fills them up.
int64_t scales_with_fill(const ReceivedScales& scales) {
  const bool has_fill = scales.layout == EPX_SCALES_PACKED || scales.layout == EPX_SCALES_TILES;
  return has_fill ? rounded_up(scales.num_scales, 4) : scales.num_scales;
}

// The offset in bytes of scale i of row n.
int64_t offset_of(const ReceivedScales& scales, int64_t n, int64_t i) {
  const int64_t ld = rounded_up(scales.rows, 4);
  switch (scales.layout) {
  case EPX_SCALES_ROWS:
    return (n * scales.num_scales + i) * epx::row_bytes(scales.dtype, 1);
  case EPX_SCALES_COLUMNS:
    return (i * ld + n) * epx::row_bytes(scales.dtype, 1);
  case EPX_SCALES_PACKED:
    return (i / 4 * ld + n) * 4 + i % 4;
  case EPX_SCALES_TILES:
    return (n / 128 * (rounded_up(scales.num_scales, 4) / 4) + i / 4) * 512 + n % 32 * 16 + n % 128 / 32 * 4 + i % 4;
  }
  throw std::invalid_argument("not a layout of scales");
}

} // namespace

int64_t num_scales(epx_scaling scaling, int64_t hidden) {
  return (hidden + block_of(scaling) - 1) / block_of(scaling);
}

QuantisedRows quantise(const Format& format, const Matrix& rows, std::optional<float> encode_scale) {
  const int64_t scales = num_scales(format.scaling, rows.cols);
  QuantisedRows to{zeros(format.dtype, rows.rows, rows.cols), zeros(format.scales, rows.rows, scales), {}};
  for (int64_t row = 0; row < rows.rows; ++row) {
    const float encode = encode_scale ? *encode_scale : encode_scale_of(amax_of(rows, row, 0, rows.cols));
    for (int64_t block = 0; block < scales; ++block)
      quantise_block(format, rows, row, block, encode, to);
    if (format.scaling == EPX_SCALING_NV) to.row_scales.push_back(1.0F / encode);
  }
  return to;
}

Matrix dequantise(const Format& format, const QuantisedRows& rows, epx_dtype dtype) {
  const Matrix& elements = rows.elements;
  Matrix to = zeros(dtype, elements.rows, elements.cols);
  for (int64_t row = 0; row < elements.rows; ++row)
    for (int64_t h = 0; h < elements.cols; ++h) {
      float scale = scale_at(rows.scales, row, h / block_of(format.scaling));
      if (format.scaling == EPX_SCALING_NV) scale *= rows.row_scales[row];
      store(to, row, h, value_of(elements.dtype, code_at(elements, row, h)) * scale);
    }
  return to;
}

int64_t bytes_of(const ReceivedScales& shape) {
  const int64_t ld = rounded_up(shape.rows, 4);
  switch (shape.layout) {
  case EPX_SCALES_ROWS:
    return shape.rows * shape.num_scales * epx::row_bytes(shape.dtype, 1);
  case EPX_SCALES_COLUMNS:
    return shape.num_scales * ld * epx::row_bytes(shape.dtype, 1);
  case EPX_SCALES_PACKED:
    return scales_with_fill(shape) * ld;
  case EPX_SCALES_TILES:
    return scales_with_fill(shape) * rounded_up(shape.rows, 128);
  }
  throw std::invalid_argument("not a layout of scales");
}

Arrivals::Arrivals(std::span<const Matrix> tokens, const FormatTensors* formats) : tokens_(tokens), formats_(formats) {
  if (formats_ == nullptr) return;
  const size_t num_ranks = tokens.size();
  const bool is_nv = formats_->format.scaling == EPX_SCALING_NV;
  const auto require_each = [&](size_t size, bool wanted) {
    require_format(size == (wanted ? num_ranks : 0), "a tensor of the format is missing, or too many are given");
  };
  const bool arrives_quantised = !formats_->recv_scales.empty(), is_quantised = !formats_->scales.empty();
  require_each(formats_->recv_scales.size(), arrives_quantised);
  require_each(formats_->recv_row_scales.size(), arrives_quantised && is_nv);
  require_each(formats_->scales.size(), is_quantised);
  require_each(formats_->row_scales.size(), is_quantised && is_nv);
  require_each(formats_->encode_scales.size(), !formats_->encode_scales.empty());
  require_format(arrives_quantised || !is_quantised, "rows that come quantised arrive so");
  for (const ReceivedScales& scales : formats_->recv_scales)
    require_format(static_cast<int64_t>(scales.bytes.size()) == bytes_of(scales),
                   "scales have other bytes than their layout");
  if (is_quantised) {
    scales_.assign(formats_->scales.begin(), formats_->scales.end());
    row_scales_.assign(formats_->row_scales.begin(), formats_->row_scales.end());
    for (size_t rank = 0; rank < num_ranks; ++rank)
      values_.push_back(dequantise(
          formats_->format, {tokens[rank], scales_[rank], is_nv ? row_scales_[rank] : std::vector<float>{}}, EPX_FLOAT32));
    return;
  }
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    QuantisedRows rows = quantise(formats_->format, tokens[rank],
                                  formats_->encode_scales.empty() ? std::nullopt : formats_->encode_scales[rank]);
    values_.push_back(dequantise(formats_->format, rows, EPX_FLOAT32));
    rows_.push_back(arrives_quantised ? std::move(rows.elements) : dequantise(formats_->format, rows, tokens[rank].dtype));
    scales_.push_back(std::move(rows.scales));
    row_scales_.push_back(std::move(rows.row_scales));
  }
}

void Arrivals::put_scales(size_t source, int64_t token, size_t receiver, int64_t row, std::optional<float> weight) const {
  if (!has_scales()) return;
  zero_scales(receiver, row); // the fill
  const Matrix& from = scales_[source];
  ReceivedScales& to = formats_->recv_scales[receiver];
  const int64_t scale_bytes = epx::row_bytes(to.dtype, 1);
  for (int64_t i = 0; i < to.num_scales; ++i)
    std::memcpy(&to.bytes[offset_of(to, row, i)], &from.bytes[(token * to.num_scales + i) * scale_bytes], scale_bytes);
  if (!formats_->recv_row_scales.empty()) formats_->recv_row_scales[receiver][row] = row_scales_[source][token];
  if (!weight) return;
  require_format(formats_->format.scaling == EPX_SCALING_BLOCK128, "only the scales of BLOCK128 take weights");
  for (int64_t i = 0; i < to.num_scales; ++i) {
    float scale = load(from, token, i) * *weight;
    std::memcpy(&to.bytes[offset_of(to, row, i)], &scale, sizeof(scale));
  }
}

void Arrivals::zero_scales(size_t receiver, int64_t row) const {
  if (!has_scales()) return;
  ReceivedScales& to = formats_->recv_scales[receiver];
  for (int64_t i = 0; i < scales_with_fill(to); ++i)
    std::memset(&to.bytes[offset_of(to, row, i)], 0, epx::row_bytes(to.dtype, 1));
  if (!formats_->recv_row_scales.empty()) formats_->recv_row_scales[receiver][row] = 0.0F;
}

} // namespace epx::reference
