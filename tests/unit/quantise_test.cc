// SPDX-License-Identifier: Apache-2.0
// The arithmetic of quantised rows against tables of values in double, which holds all of them and the points between two exactly;
// then the row kernels of every instruction set against the same steps done element by element. tests/formats compares the same
// kernels with definitions in Python.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "base/dtypes.h"
#include "runtime/formats/scaling.h"
#include "runtime/reference/reference.h"
#include "runtime/stages/host/rows/rows.h"

namespace {

namespace formats = epx::formats;
using epx::WireFormat;

constexpr float kQuietNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Magnitudes of the codes from 0 on, without NaN and infinity.
template <typename Type>
std::vector<double> code_magnitudes() {
  std::vector<double> magnitudes;
  for (int code = 0; code <= static_cast<int>(Type::kLargestCode); ++code) {
    const int exponent = code >> Type::kMantissaBits;
    const double mantissa = std::ldexp(code & ((1 << Type::kMantissaBits) - 1), -Type::kMantissaBits);
    magnitudes.push_back(exponent == 0 ? std::ldexp(mantissa, 1 - Type::kBias)
                                       : std::ldexp(1 + mantissa, exponent - Type::kBias));
  }
  return magnitudes;
}

// The code of the nearest value, of two the even one.
template <typename Type>
uint32_t nearest_code(float value) {
  static const std::vector<double> kMagnitudes = code_magnitudes<Type>();
  const uint32_t sign = std::signbit(value) ? 1u << (Type::kBits - 1) : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto above = std::lower_bound(kMagnitudes.begin(), kMagnitudes.end(), magnitude);
  if (above == kMagnitudes.end()) return sign | Type::kLargestCode;
  const auto code = static_cast<uint32_t>(above - kMagnitudes.begin());
  if (*above == magnitude) return sign | code;
  const double below = kMagnitudes[code - 1];
  const bool down = magnitude - below < *above - magnitude || (magnitude - below == *above - magnitude && code % 2 == 1);
  return sign | (down ? code - 1 : code);
}

template <typename Type>
uint32_t element_code(float value) {
  if (std::isfinite(value)) return nearest_code<Type>(value);
  return std::isinf(value) && Type::kBits == 8 && Type::kLargestCode == 0x7b ? (value < 0 ? 0xfcu : 0x7cu) : 0x7fu;
}

template <typename Type>
void check_type() {
  const std::vector<double> magnitudes = code_magnitudes<Type>();
  CHECK(magnitudes.back() == Type::kLargest);
  const uint32_t sign = 1u << (Type::kBits - 1);
  for (uint32_t code = 0; code < 2 * sign; ++code) {
    CAPTURE(code);
    const float value = formats::decode<Type>(code);
    const uint32_t magnitude = code & (sign - 1);
    if (magnitude < magnitudes.size()) {
      CHECK(std::fabs(value) == magnitudes[magnitude]);
      CHECK(std::signbit(value) == (code >= sign));
      CHECK(formats::encode_saturating<Type>(value) == code);
      if constexpr (Type::kBits == 8) CHECK(formats::encode<Type>(value) == code);
    } else if (Type::kLargestCode == 0x7b && magnitude == 0x7c) {
      CHECK(value == (code >= sign ? -kInfinity : kInfinity));
    } else {
      CHECK(std::isnan(value));
    }
  }
  // All bfloat16, which have every magnitude; every point between two codes, and the float32 on both sides of it.
  int wrong = 0;
  const auto check = [&](float value) {
    const bool same = std::isnan(value) || formats::encode_saturating<Type>(value) == nearest_code<Type>(value);
    bool same_element = true;
    if constexpr (Type::kBits == 8) same_element = formats::encode<Type>(value) == element_code<Type>(value);
    wrong += !(same && same_element);
  };
  for (uint32_t pattern = 0; pattern < 65536; ++pattern)
    check(std::bit_cast<float>(pattern << 16));
  for (size_t code = 0; code + 1 < magnitudes.size(); ++code) {
    const auto middle = static_cast<float>((magnitudes[code] + magnitudes[code + 1]) / 2);
    for (const float value : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, kInfinity)}) {
      check(value);
      check(-value);
    }
  }
  CHECK(wrong == 0);
}

struct QuantisedRow {
  std::vector<std::byte> elements;
  std::vector<std::byte> scales;
  float row_scale = -1.0f; // of formats that have none

  QuantisedRow(const WireFormat& format, int64_t hidden)
      : elements(static_cast<size_t>(format.element_bytes(hidden))),
        scales(static_cast<size_t>(format.scale_bytes(hidden))) {}
  bool operator==(const QuantisedRow&) const = default;
};

struct NamedFormat {
  const char* name;
  WireFormat format;
};

const NamedFormat kQuantisedFormats[] = {
    {"BLOCK128", {EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0f}},
    {"BLOCK128, floor 1e-4", {EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 1e-4f}},
    {"BLOCK128_POW2, float32", {EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0f}},
    {"BLOCK128_POW2, E8M0", {EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 0.0f}},
    {"BLOCK128_POW2, E8M0, floor 1e-4", {EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 1e-4f}},
    {"MX, E4M3", {EPX_SCALING_MX, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 0.0f}},
    {"MX, E5M2", {EPX_SCALING_MX, EPX_FLOAT8_E5M2, EPX_FLOAT8_E8M0, 0.0f}},
    {"NV", {EPX_SCALING_NV, EPX_FLOAT4_E2M1, EPX_FLOAT8_E4M3, 0.0f}},
};

float finite_amax(const std::vector<float>& row, int64_t start, int64_t end) {
  float amax = 0.0f;
  for (int64_t i = start; i < end; ++i)
    if (std::isfinite(row[static_cast<size_t>(i)])) amax = std::max(amax, std::fabs(row[static_cast<size_t>(i)]));
  return amax;
}

// The exponent of the least power of two that is not below the value; of 0, one that is below all.
int exponent_up(float value) {
  if (value == 0.0f) return -10000;
  int exponent = 0;
  const double mantissa = std::frexp(static_cast<double>(value), &exponent);
  return mantissa == 0.5 ? exponent - 1 : exponent;
}

// epx.h's definition, one element at a time.
QuantisedRow expected_quantised(const WireFormat& format, const std::vector<float>& row, const float* encode_scale) {
  const auto hidden = static_cast<int64_t>(row.size());
  QuantisedRow out(format, hidden);
  float e = 1.0f;
  if (format.scaling == EPX_SCALING_NV) {
    const float amax = finite_amax(row, 0, hidden);
    e = encode_scale != nullptr ? *encode_scale : amax == 0.0f ? 1.0f : std::fmin(2688.0f / amax, 0x1.fffffep127f);
    out.row_scale = 1.0f / e;
  }
  for (int64_t start = 0; start < hidden; start += format.block()) {
    const int64_t end = std::min(hidden, start + format.block());
    const float amax = finite_amax(row, start, end);
    const float a = std::max(amax, format.amax_floor);
    uint32_t stored = 0;
    float multiplier = 1.0f;
    if (format.scaling == EPX_SCALING_BLOCK128) {
      const float scale = a == 0.0f ? 1.0f : a / 448.0f;
      stored = std::bit_cast<uint32_t>(scale);
      multiplier = std::fmin(1.0f / scale, 0x1.fffffep127f);
    } else if (format.scaling == EPX_SCALING_BLOCK128_POW2) {
      const int exponent = a == 0.0f ? 0 : std::clamp(exponent_up(a / 448.0f), -126, 127);
      stored = format.scales == EPX_FLOAT32 ? std::bit_cast<uint32_t>(std::ldexp(1.0f, exponent))
                                            : static_cast<uint32_t>(exponent + 127);
      multiplier = std::ldexp(1.0f, -exponent);
    } else if (format.scaling == EPX_SCALING_MX) {
      const float largest = format.elements == EPX_FLOAT8_E5M2 ? 57344.0f : 448.0f;
      stored = static_cast<uint32_t>(std::max(exponent_up(amax * (1.0f / largest)), -127) + 127);
      multiplier = std::ldexp(1.0f, 127 - static_cast<int>(stored));
    } else {
      stored = nearest_code<formats::E4M3>(std::fmin(amax * (e * (1.0f / 6.0f)), 0x1.fffffep127f));
      multiplier = stored == 0 ? 0.0f : std::fmin(e / formats::decode<formats::E4M3>(stored), 0x1.fffffep127f);
      for (int64_t i = start; i < end; ++i)
        if (!std::isfinite(row[static_cast<size_t>(i)])) {
          stored = 0x7f;
          multiplier = 0.0f;
        }
    }
    std::memcpy(&out.scales[static_cast<size_t>(epx::row_bytes(format.scales, start / format.block()))], &stored,
                static_cast<size_t>(epx::row_bytes(format.scales, 1)));
    for (int64_t i = start; i < end; ++i) {
      const float value = row[static_cast<size_t>(i)] * multiplier;
      if (format.elements == EPX_FLOAT4_E2M1) {
        if (multiplier != 0.0f)
          out.elements[static_cast<size_t>(i / 2)] |=
              static_cast<std::byte>(nearest_code<formats::E2M1>(value) << (i % 2 * 4));
      } else {
        out.elements[static_cast<size_t>(i)] = static_cast<std::byte>(
            format.elements == EPX_FLOAT8_E5M2 ? element_code<formats::E5M2>(value) : element_code<formats::E4M3>(value));
      }
    }
  }
  return out;
}

float expected_element(const WireFormat& format, const QuantisedRow& row, int64_t i) {
  const auto code = static_cast<uint32_t>(row.elements[static_cast<size_t>(epx::row_bytes(format.elements, i + 1) - 1)]);
  const auto block = static_cast<size_t>(i / format.block());
  float scale = 0.0f;
  if (format.scales == EPX_FLOAT32)
    std::memcpy(&scale, &row.scales[4 * block], sizeof(scale));
  else if (format.scales == EPX_FLOAT8_E8M0)
    scale = row.scales[block] == std::byte{255} ? kQuietNan : std::ldexp(1.0f, static_cast<int>(row.scales[block]) - 127);
  else
    scale = formats::decode<formats::E4M3>(static_cast<uint32_t>(row.scales[block])) * row.row_scale;
  if (format.elements == EPX_FLOAT4_E2M1) return formats::decode<formats::E2M1>(code >> (i % 2 * 4) & 0xf) * scale;
  return scale *
         (format.elements == EPX_FLOAT8_E5M2 ? formats::decode<formats::E5M2>(code) : formats::decode<formats::E4M3>(code));
}

// Checks both directions of a row, on every instruction set.
void check_row(const epx::reference::Matrix& row, const float* encode_scale = nullptr) {
  const int64_t hidden = row.cols;
  std::vector<float> values;
  for (int64_t c = 0; c < hidden; ++c)
    values.push_back(epx::reference::load(row, 0, c));
  for (const NamedFormat& named : kQuantisedFormats) {
    const WireFormat& format = named.format;
    if (format.scaling == EPX_SCALING_NV && hidden % 2 != 0) continue;
    const QuantisedRow expected = expected_quantised(format, values, encode_scale);
    epx::reference::Matrix expected_back = row;
    for (int64_t c = 0; c < hidden; ++c)
      epx::reference::store(expected_back, 0, c, expected_element(format, expected, c));
    for (int index = 0; index < epx::rows::num_row_kernels(); ++index) {
      const epx::rows::RowKernels& kernels = epx::rows::row_kernels(index);
      CAPTURE(kernels.instruction_set);
      CAPTURE(named.name);
      CAPTURE(hidden);
      QuantisedRow actual(format, hidden);
      kernels.quantise(format, row.dtype, row.bytes.data(), hidden, encode_scale, actual.elements.data(),
                       actual.scales.data(), &actual.row_scale);
      CHECK(actual == expected);
      epx::reference::Matrix back = row;
      kernels.dequantise(format, row.dtype, actual.elements.data(), actual.scales.data(), actual.row_scale, nullptr, hidden,
                         back.bytes.data());
      CHECK(epx::reference::count_wrong(expected_back, back, true) == 0);
    }
  }
}

epx::reference::Matrix row_of(epx_dtype dtype, const std::vector<float>& values) {
  const auto hidden = static_cast<int64_t>(values.size());
  epx::reference::Matrix row{dtype, 1, hidden, std::vector<std::byte>(static_cast<size_t>(epx::row_bytes(dtype, hidden)))};
  for (int64_t c = 0; c < hidden; ++c)
    epx::reference::store(row, 0, c, values[static_cast<size_t>(c)]);
  return row;
}

} // namespace

TEST_CASE("E4M3, E5M2 and E2M1 have all their codes, and round to the nearest") {
  check_type<formats::E4M3>();
  check_type<formats::E5M2>();
  check_type<formats::E2M1>();
}

TEST_CASE("E8M0 has all its bytes, and takes the power of two that is not below") {
  for (int byte = 0; byte < 255; ++byte) {
    CAPTURE(byte);
    const auto code = static_cast<uint32_t>(byte);
    const float power = std::ldexp(1.0f, byte - 127);
    CHECK(formats::decode_e8m0(code) == power);
    CHECK(formats::reciprocal_of_e8m0(code) == std::ldexp(1.0f, 127 - byte));
    CHECK(formats::encode_e8m0_up(power) == code);
    CHECK(formats::encode_e8m0_up(std::nextafter(power, 0.0f)) == code);
    CHECK(formats::encode_e8m0_up(std::nextafter(power, kInfinity)) == std::min(code + 1, 254u)); // saturates
    CHECK(formats::encode_normal_e8m0_up(power) == std::max(code, 1u));
    CHECK(formats::encode_normal_e8m0_up(std::nextafter(power, kInfinity)) == std::min(code + 1, 254u));
  }
  CHECK(formats::encode_e8m0_up(0.0f) == 0);
  CHECK(formats::encode_normal_e8m0_up(0.0f) == 1);
  CHECK(std::isnan(formats::decode_e8m0(255)));
  CHECK(formats::encode_e8m0_up(kQuietNan) == 255);
}

TEST_CASE("the scales of a block are those of epx.h") {
  const WireFormat floored = {EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 1e-4f};
  CHECK(formats::scale_block(floored, 0.0f, true, 1.0f).stored == std::bit_cast<uint32_t>(1e-4f / 448.0f));
  CHECK(formats::scale_block128(0.0f, 0.0f).stored == std::bit_cast<uint32_t>(1.0f));
  CHECK(formats::scale_block128(0x1p-149f, 0.0f).stored == 0); // the quotient underflows
  CHECK(formats::scale_block128(0x1p-149f, 0.0f).multiplier == 0x1.fffffep127f);
  CHECK(formats::scale_block128_pow2(448.0f, 0.0f, true).stored == 127);
  CHECK(formats::scale_block128_pow2(449.0f, 0.0f, true).stored == 128);
  CHECK(formats::scale_block128_pow2(0x1p-149f, 0.0f, true).stored == 1);
  CHECK(formats::scale_block128_pow2(0.0f, 0.0f, false).stored == std::bit_cast<uint32_t>(1.0f));
  CHECK(formats::scale_mx<formats::E4M3>(0.0f).stored == 0);
  CHECK(formats::scale_mx<formats::E5M2>(57344.0f).stored == 127);
  CHECK(formats::nv_encode_scale(0.0f) == 1.0f);
  CHECK(formats::nv_encode_scale(0x1p-149f) == 0x1.fffffep127f);
  CHECK(formats::scale_nv(6.0f, true, 448.0f).stored == 0x7e);
  CHECK(formats::scale_nv(6.0f, true, 1e6f).stored == 0x7e); // saturates
  CHECK(formats::scale_nv(3e38f, true, 3e38f).stored == 0x7e);
  CHECK(formats::scale_nv(1.0f, true, 1e-6f).stored == 0);
  CHECK(formats::scale_nv(1.0f, true, 1e-6f).multiplier == 0.0f);
  CHECK(formats::scale_nv(1.0f, false, 1.0f).stored == 0x7f);
  CHECK(formats::nv_row_scale(0x1.fffffep127f) == 0x1p-128f);
}

TEST_CASE("every 16-bit pattern is quantised as epx.h says, on every instruction set") {
  for (const epx_dtype dtype : {EPX_BFLOAT16, EPX_FLOAT16}) {
    // In order, blocks have one magnitude; shuffled, they have all, and every block of 128 has a number that is not finite.
    std::vector<uint16_t> patterns(65536);
    for (size_t i = 0; i < patterns.size(); ++i)
      patterns[i] = static_cast<uint16_t>(i);
    for (const bool shuffled : {false, true}) {
      CAPTURE(dtype);
      CAPTURE(shuffled);
      if (shuffled) std::shuffle(patterns.begin(), patterns.end(), std::mt19937(1));
      epx::reference::Matrix all{dtype, 1, 65536, std::vector<std::byte>(131072)};
      std::memcpy(all.bytes.data(), patterns.data(), all.bytes.size());
      check_row(all);
    }
  }
}

TEST_CASE("rows of every length and of special blocks are quantised as epx.h says") {
  for (const int hidden : {1, 2, 16, 31, 100, 128, 130, 2880, 7168, 9000}) {
    for (const epx_dtype dtype : {EPX_FLOAT32, EPX_BFLOAT16, EPX_FLOAT16}) {
      std::mt19937 random(static_cast<uint32_t>(hidden));
      std::normal_distribution<float> normal;
      std::vector<float> values(static_cast<size_t>(hidden));
      for (float& value : values)
        value = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 12) - 8);
      CAPTURE(dtype);
      check_row(row_of(dtype, values));
      for (const float e : {0x1p-20f, 0.37f, 448.0f, 3e7f, 0x1.fffffep127f}) {
        CAPTURE(e);
        check_row(row_of(dtype, values), &e);
      }
    }
  }
  for (const float magnitude : {0.0f, 0x1p-149f, 0x1.8p-140f, 0x1p-127f, 0x1p-126f, 1e-9f, 1e-4f, 1.0f, 448.0f, 449.0f,
                                464.0f, 6.0f, 65504.0f, 1e38f, 0x1.fffffep127f}) {
    CAPTURE(magnitude);
    std::vector<float> values(300, magnitude);
    for (size_t i = 0; i < values.size(); i += 3)
      values[i] = -magnitude;
    check_row(row_of(EPX_FLOAT32, values));
    for (const float special : {kQuietNan, -kQuietNan, kInfinity, -kInfinity}) {
      std::vector<float> with_special = values;
      with_special[1] = with_special[140] = with_special[299] = special;
      check_row(row_of(EPX_FLOAT32, with_special));
    }
  }
  for (const float special : {kQuietNan, kInfinity, -kInfinity})
    check_row(row_of(EPX_BFLOAT16, std::vector<float>(256, special)));
}

TEST_CASE("every code and every E8M0 scale is dequantised as epx.h says") {
  for (const NamedFormat& named : kQuantisedFormats) {
    const WireFormat& format = named.format;
    const int64_t hidden = 256 * format.block();
    QuantisedRow row(format, hidden);
    row.row_scale = 0.3f;
    for (size_t i = 0; i < row.elements.size(); ++i)
      row.elements[i] = static_cast<std::byte>(i * 37);
    for (size_t i = 0; i < row.scales.size(); ++i)
      row.scales[i] = static_cast<std::byte>(format.scales == EPX_FLOAT32 ? i * 73 : i);
    for (const epx_dtype dtype : {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16}) {
      epx::reference::Matrix expected{dtype, 1, hidden,
                                      std::vector<std::byte>(static_cast<size_t>(epx::row_bytes(dtype, hidden)))};
      for (int64_t c = 0; c < hidden; ++c)
        epx::reference::store(expected, 0, c, expected_element(format, row, c));
      for (int index = 0; index < epx::rows::num_row_kernels(); ++index) {
        const epx::rows::RowKernels& kernels = epx::rows::row_kernels(index);
        CAPTURE(kernels.instruction_set);
        CAPTURE(named.name);
        CAPTURE(dtype);
        epx::reference::Matrix actual = expected;
        std::fill(actual.bytes.begin(), actual.bytes.end(), std::byte{0xa5});
        kernels.dequantise(format, dtype, row.elements.data(), row.scales.data(), row.row_scale, nullptr, hidden,
                           actual.bytes.data());
        CHECK(epx::reference::count_wrong(expected, actual, true) == 0);
      }
    }
  }
}
