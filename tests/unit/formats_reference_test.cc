// SPDX-License-Identifier: Apache-2.0
// The oracle of quantised rows is compared with answers worked out by hand from epx.h.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "runtime/reference/formats.h"
#include "runtime/reference/rank_major.h"
#include "runtime/reference/reference.h"

namespace {

using epx::reference::Matrix;
using epx::reference::QuantisedRows;
using epx::reference::ReceivedScales;

using Codes = std::vector<int>;
using Values = std::vector<float>;

constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinite = std::numeric_limits<float>::infinity();

Matrix one_row(const Values& values) {
  Matrix matrix{EPX_FLOAT32, 1, static_cast<int64_t>(values.size()), std::vector<std::byte>(values.size() * sizeof(float))};
  std::memcpy(matrix.bytes.data(), values.data(), matrix.bytes.size());
  return matrix;
}

Codes codes_of(const std::vector<std::byte>& bytes) {
  Codes codes;
  for (const std::byte byte : bytes)
    codes.push_back(std::to_integer<int>(byte));
  return codes;
}

Values floats_of(const Matrix& matrix) {
  Values values(matrix.bytes.size() / sizeof(float));
  std::memcpy(values.data(), matrix.bytes.data(), matrix.bytes.size());
  return values;
}

constexpr epx::reference::Format kBlock128{EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0F};
constexpr epx::reference::Format kPow2{EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 0.0F};
constexpr epx::reference::Format kMx{EPX_SCALING_MX, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 0.0F};
constexpr epx::reference::Format kMxE5M2{EPX_SCALING_MX, EPX_FLOAT8_E5M2, EPX_FLOAT8_E8M0, 0.0F};
constexpr epx::reference::Format kNv{EPX_SCALING_NV, EPX_FLOAT4_E2M1, EPX_FLOAT8_E4M3, 0.0F};

epx::reference::Format with_floor(epx::reference::Format format, float amax_floor) {
  format.amax_floor = amax_floor;
  return format;
}

QuantisedRows quantised(const epx::reference::Format& format, const Values& values, std::optional<float> encode = {}) {
  return epx::reference::quantise(format, one_row(values), encode);
}

Codes elements_of(const epx::reference::Format& format, const Values& values, std::optional<float> encode = {}) {
  return codes_of(quantised(format, values, encode).elements.bytes);
}

Codes scales_of(const epx::reference::Format& format, const Values& values) {
  return codes_of(quantised(format, values).scales.bytes);
}

float block128_scale(float amax, float amax_floor) {
  return floats_of(quantised(with_floor(kBlock128, amax_floor), {amax}).scales).at(0);
}

} // namespace

TEST_CASE("row formats: E4M3 rounds to nearest even, saturates, and has a NaN for what is not finite") {
  // 448 makes the scale 1.
  CHECK(elements_of(kBlock128, {448.0F, 1.0F, 1.0625F, 1.1875F, 0x1p-9F, 0x1p-10F, 0x1.8p-10F, -0.0F, -448.0F}) ==
        Codes{0x7E, 0x38, 0x38, 0x3A, 0x01, 0x00, 0x01, 0x80, 0xFE});
  CHECK(elements_of(kBlock128, {448.0F, kNotANumber, kInfinite, -kInfinite, 0x1p-6F, 0x1.fp-7F}) ==
        Codes{0x7E, 0x7F, 0x7F, 0x7F, 0x08, 0x08});
  CHECK(elements_of(kBlock128, {448.0F, 431.0F, 432.0F, 433.0F}) == Codes{0x7E, 0x7D, 0x7E, 0x7E}); // 416 and 448
}

TEST_CASE("row formats: BLOCK128 has the floor of amax, a scale of 1 for zeros, and blocks of their own") {
  CHECK(block128_scale(896.0F, 0.0F) == 2.0F);
  CHECK(block128_scale(1.0F, 1e-4F) == 1.0F / 448.0F);
  CHECK(block128_scale(1e-5F, 1e-4F) == 1e-4F / 448.0F);
  CHECK(block128_scale(0.0F, 1e-4F) == 1e-4F / 448.0F);
  CHECK(block128_scale(0.0F, 0.0F) == 1.0F);
  CHECK(block128_scale(0x1p-149F, 0.0F) == 0.0F); // its reciprocal is FLT_MAX
  CHECK(elements_of(kBlock128, {0x1p-149F, -0x1p-149F}) == Codes{0x00, 0x80});
  CHECK(elements_of(kBlock128, {kNotANumber, 0.0F}) == Codes{0x7F, 0x00}); // no finite element but zero
  // fl(1 / 63) is above 1 / 63: it takes 66.9375, which is 63 * 1.0625, over the middle between 1 and 1.125.
  Values row(130, 0.0F);
  row[0] = 28224.0F;
  row[1] = 66.9375F;
  row[128] = 896.0F;
  row[129] = 2.125F;
  const QuantisedRows two = quantised(kBlock128, row);
  CHECK(floats_of(two.scales) == Values{63.0F, 2.0F});
  CHECK(std::to_integer<int>(two.elements.bytes[0]) == 0x7E);
  CHECK(std::to_integer<int>(two.elements.bytes[1]) == 0x39);
  CHECK(std::to_integer<int>(two.elements.bytes[129]) == 0x38);
}

TEST_CASE("row formats: BLOCK128_POW2 takes the power of two above the quotient, in both dtypes of scales") {
  CHECK(scales_of(kPow2, {448.0F}) == Codes{127});
  CHECK(scales_of(kPow2, {449.0F}) == Codes{128});
  CHECK(elements_of(kPow2, {449.0F, 2.0F}) == Codes{0x76, 0x38});   // 224.5 -> 224
  CHECK(scales_of(with_floor(kPow2, 1e-4F), {0.0F}) == Codes{105}); // 2.2e-7 below 2^-22
  CHECK(scales_of(kPow2, {0.0F}) == Codes{127});
  CHECK(scales_of(kPow2, {0x1p-149F}) == Codes{1}); // 2^-126 is the least scale
  CHECK(scales_of(kPow2, {448.0F * 0x1p-126F}) == Codes{1});
  CHECK(scales_of(kPow2, {449.0F * 0x1p-126F}) == Codes{2});
  CHECK(scales_of(kPow2, {std::numeric_limits<float>::max()}) == Codes{127 + 120}); // 2^128 / 448 below 2^120
  epx::reference::Format wide = kPow2;
  wide.scales = EPX_FLOAT32;
  CHECK(floats_of(quantised(wide, {449.0F}).scales) == Values{2.0F});
  CHECK(floats_of(quantised(wide, {0x1p-149F}).scales) == Values{0x1p-126F});
}

TEST_CASE("row formats: MX takes the least power of two that is not below the product, by 32") {
  CHECK(scales_of(kMx, {448.0F}) == Codes{127}); // 448 * fl(1 / 448) rounds to 1
  CHECK(scales_of(kMx, {449.0F}) == Codes{128});
  CHECK(scales_of(kMx, {0.0F}) == Codes{0});
  CHECK(scales_of(kMx, {0x1p-126F}) == Codes{0}); // 2^-127 is the least scale
  CHECK(elements_of(kMx, {0x1p-126F, 0x1p-140F}) == Codes{0x40, 0x00});
  CHECK(scales_of(kMx, {672.0F * 0x1p-127F}) == Codes{1});
  CHECK(elements_of(kMx, {672.0F * 0x1p-127F}) == Codes{0x7A}); // 336: between 320 and 352
  CHECK(elements_of(kMx, {448.0F, kInfinite, kNotANumber}) == Codes{0x7E, 0x7F, 0x7F});
  Values row(65, 1.0F);
  row[32] = 449.0F;
  row[64] = 448.0F;
  CHECK(scales_of(kMx, row) == Codes{119, 128, 127}); // 1 / 448 below 2^-8
  CHECK(scales_of(kMxE5M2, {57344.0F}) == Codes{127});
  CHECK(elements_of(kMxE5M2, {57344.0F, 1.125F, 1.375F, 0x1p-16F, kInfinite, -kInfinite, kNotANumber}) ==
        Codes{0x7B, 0x3C, 0x3E, 0x01, 0x7C, 0xFC, 0x7F});
  CHECK(scales_of(kMxE5M2, {57345.0F}) == Codes{128});
}

TEST_CASE("row formats: NV packs two elements, and scales blocks by the row's amax or by the caller's number") {
  // The row's amax is 6, so e = 448; the scale of the block is 448, and x * 1 is rounded.
  CHECK(elements_of(kNv, {6.0F, 0.5F, 0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F, -6.0F, -0.25F, 3.0F}) ==
        Codes{0x17, 0x20, 0x42, 0x64, 0xF6, 0x58});
  Values row(34, 0.0F);
  row[0] = 6.0F;
  row[17] = -3.0F; // 3 * 448 / 6 = 224, and 448 / 224 = 2
  const QuantisedRows three = quantised(kNv, row);
  CHECK(codes_of(three.scales.bytes) == Codes{0x7E, 0x76, 0x00});
  CHECK(three.row_scales == Values{1.0F / 448.0F});
  CHECK(std::to_integer<int>(three.elements.bytes[8]) == 0xF0);
  const QuantisedRows empty = quantised(kNv, {0.0F, -0.0F});
  CHECK(codes_of(empty.elements.bytes) == Codes{0});
  CHECK(codes_of(empty.scales.bytes) == Codes{0});
  CHECK(empty.row_scales == Values{1.0F});
  // A block with an infinity is lost, and does not count for the row.
  row[17] = kInfinite;
  row[18] = 6.0F;
  const QuantisedRows lost = quantised(kNv, row);
  CHECK(codes_of(lost.scales.bytes) == Codes{0x7E, 0x7F, 0x00});
  CHECK(codes_of(lost.elements.bytes) == Codes{7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  CHECK(lost.row_scales == Values{1.0F / 448.0F});
  // The caller's number saturates where the row has larger elements.
  const QuantisedRows given = quantised(kNv, {12.0F, 3.0F}, 448.0F);
  CHECK(codes_of(given.scales.bytes) == Codes{0x7E});
  CHECK(codes_of(given.elements.bytes) == Codes{0x57});
  CHECK(given.row_scales == Values{1.0F / 448.0F});
  // 30 * (2.5 * fl(1 / 6)) is above 12.5, the tie between 12 and 13; (30 * 2.5) * fl(1 / 6) would be the tie.
  CHECK(codes_of(quantised(kNv, {30.0F, 0.0F}, 2.5F).scales.bytes) == Codes{0x55});
  // 2688 / amax is beyond FLT_MAX.
  CHECK(quantised(kNv, {0x1p-130F, 0.0F}).row_scales == Values{1.0F / std::numeric_limits<float>::max()});
}

TEST_CASE("row formats: an element stands for itself times its scale, rounded once") {
  const auto back = [](const epx::reference::Format& format, const Values& values, epx_dtype dtype) {
    return epx::reference::dequantise(format, quantised(format, values), dtype);
  };
  CHECK(floats_of(back(kBlock128, {1344.0F, 3.0F, -0.0F}, EPX_FLOAT32)) == Values{1344.0F, 3.0F, -0.0F});
  CHECK(floats_of(back(kMx, {449.0F, 2.0F}, EPX_FLOAT32)) == Values{448.0F, 2.0F});
  const float row_scale = 1.0F / 448.0F;
  CHECK(floats_of(back(kNv, {6.0F, -3.0F}, EPX_FLOAT32)) ==
        Values{6.0F * (448.0F * row_scale), -3.0F * (448.0F * row_scale)});
  CHECK(std::isnan(floats_of(back(kNv, {kInfinite, 1.0F}, EPX_FLOAT32)).at(1)));
  CHECK(floats_of(back(kMxE5M2, {-kInfinite}, EPX_FLOAT32)) == Values{-kInfinite});
  // 0x1.01p0 is 1 + 2^-8, a tie of bfloat16 between 1 and 1 + 2^-7.
  QuantisedRows one = quantised(kBlock128, {448.0F, 1.0F});
  const float scale = 0x1.01p0F;
  std::memcpy(one.scales.bytes.data(), &scale, sizeof(scale));
  CHECK(codes_of(epx::reference::dequantise(kBlock128, one, EPX_BFLOAT16).bytes) == Codes{0xE1, 0x43, 0x80, 0x3F});
}

TEST_CASE("row formats: where each layout has the scales of a row") {
  constexpr int64_t kRow = 70, kRows = 130, kScales = 5;
  struct Layout {
    epx_scale_layout layout;
    epx_dtype dtype;
    int64_t bytes;
    std::vector<int64_t> offsets; // of the row's scales
    std::vector<int64_t> fill;
  };
  const Layout layouts[] = {
      {EPX_SCALES_ROWS, EPX_FLOAT32, 130 * 5 * 4, {1400, 1404, 1408, 1412, 1416}, {}},
      {EPX_SCALES_COLUMNS, EPX_FLOAT8_E8M0, 5 * 132, {70, 202, 334, 466, 598}, {}},
      {EPX_SCALES_COLUMNS, EPX_FLOAT32, 5 * 132 * 4, {280, 808, 1336, 1864, 2392}, {}},
      {EPX_SCALES_PACKED, EPX_FLOAT8_E8M0, 2 * 132 * 4, {280, 281, 282, 283, 808}, {809, 810, 811}},
      {EPX_SCALES_TILES, EPX_FLOAT8_E4M3, 2 * 2 * 512, {104, 105, 106, 107, 616}, {617, 618, 619}}, // 6 * 16 + 2 * 4
  };
  for (const Layout& layout : layouts) {
    CAPTURE(static_cast<int>(layout.layout));
    const auto size = static_cast<int64_t>(layout.dtype == EPX_FLOAT32 ? 4 : 1);
    Matrix sent{layout.dtype, 1, kScales, {}};
    for (int64_t i = 0; i < kScales * size; ++i)
      sent.bytes.push_back(static_cast<std::byte>(i + 1));
    ReceivedScales received{layout.layout, layout.dtype, kRows, kScales, {}};
    CHECK(epx::reference::bytes_of(received) == layout.bytes);
    received.bytes.assign(static_cast<size_t>(layout.bytes), std::byte{0xA5});
    const epx::reference::FormatTensors formats{
        {EPX_SCALING_MX, EPX_FLOAT8_E4M3, layout.dtype}, {&sent, 1}, {}, {}, {&received, 1}, {}};
    const Matrix rows{EPX_FLOAT8_E4M3, 1, 160, std::vector<std::byte>(160)};
    const epx::reference::Arrivals arrivals({&rows, 1}, &formats);
    arrivals.put_scales(0, 0, 0, kRow);
    std::vector<std::byte> expected(received.bytes.size(), std::byte{0xA5});
    for (size_t i = 0; i < layout.offsets.size(); ++i)
      std::memcpy(&expected[static_cast<size_t>(layout.offsets[i])], &sent.bytes[i * static_cast<size_t>(size)],
                  static_cast<size_t>(size));
    for (const int64_t offset : layout.fill)
      expected[static_cast<size_t>(offset)] = std::byte{0};
    CHECK(received.bytes == expected);
  }
}

TEST_CASE("row formats: dispatch zeroes the rows and scales of pads, or leaves both, and the wire may be quantised alone") {
  const Matrix token = one_row({6.0F, 5.0F});
  const std::vector<epx::reference::Routing> routing{{1, {0}}};
  const epx::reference::Plan plan = epx::reference::prepare({1, 1, 2, 4}, routing);
  for (const bool pads_untouched : {false, true}) {
    const int pad = pads_untouched ? 0xA5 : 0;
    Matrix received{EPX_FLOAT4_E2M1, 3, 2, std::vector<std::byte>(3, std::byte{0xA5})};
    ReceivedScales scales{EPX_SCALES_PACKED, EPX_FLOAT8_E4M3, 3, 1, std::vector<std::byte>(16, std::byte{0xA5})};
    std::vector<float> row_scales(3, 9.0F);
    const epx::reference::FormatTensors formats{kNv, {}, {}, {}, {&scales, 1}, {&row_scales, 1}};
    epx::reference::dispatch(plan, {{&token, 1}, {}, {}, {&received, 1}, {}, {}, pads_untouched, &formats});
    CHECK(codes_of(received.bytes) == Codes{0x67, pad, 0xA5});
    CHECK(codes_of(scales.bytes) ==
          Codes{0x7E, 0, 0, 0, pad, pad, pad, pad, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5});
    CHECK(row_scales == Values{1.0F / 448.0F, pads_untouched ? 9.0F : 0.0F, 9.0F});
  }
  Matrix received = one_row({9.0F, 9.0F});
  const epx::reference::FormatTensors wire{kNv, {}, {}, {}, {}, {}};
  epx::reference::dispatch(plan, {{&token, 1}, {}, {}, {&received, 1}, {}, {}, false, &wire});
  const float scale = 448.0F * (1.0F / 448.0F);
  CHECK(floats_of(received) == Values{6.0F * scale, 4.0F * scale});
}

// Three ranks, whose tokens all go to each of them: the sum of a token has three partial sums, of any magnitude.
TEST_CASE("row formats: a sum over a quantised wire is within the bound that epx.h tells, and comes near it") {
  constexpr int64_t kTokens = 8, kHidden = 300;
  constexpr size_t kRanks = 3;
  const epx::reference::Problem problem{3, 3, 1, 72};
  const std::vector<epx::reference::Routing> routing(
      kRanks, {kTokens, {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2}});
  const epx::reference::RankMajorPlan plan = epx::reference::plan_rank_major(problem, routing, kTokens);
  constexpr int kExponents[] = {0,    120,  -32,  -64, -96,
                                -118, -119, -121, -128}; // of rows; the scales of some are too small for 1 / s
  std::minstd_rand rng(7);
  std::vector<Matrix> rows;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    Values values;
    for (int64_t i = 0; i < static_cast<int64_t>(kRanks) * kTokens * kHidden; ++i) {
      const auto mantissa = static_cast<float>(rng() % 4096) / 4096.0F - 0.5F;
      values.push_back(
          std::ldexp(mantissa, kExponents[i / kHidden % std::size(kExponents)] - static_cast<int>(rng() % 12)));
    }
    rows.push_back(one_row(values));
    rows.back().rows = static_cast<int64_t>(kRanks) * kTokens;
    rows.back().cols = kHidden;
  }
  for (const epx::reference::Format& format : {kBlock128, with_floor(kBlock128, 1e-4F), kMx, kMxE5M2}) {
    const bool is_e5m2 = format.dtype == EPX_FLOAT8_E5M2;
    const double step = is_e5m2 ? 0x1p-3 : 0x1p-4, least_step = is_e5m2 ? 0x1p-17 : 0x1p-10;
    const int64_t block = format.scaling == EPX_SCALING_MX ? 32 : 128;
    std::vector<Matrix> scales, out;
    for (const Matrix& matrix : rows) {
      scales.push_back(epx::reference::quantise(format, matrix).scales);
      out.push_back(one_row(Values(kTokens * kHidden)));
      out.back().rows = kTokens;
      out.back().cols = kHidden;
    }
    const auto scale_of = [&](size_t rank, int64_t row, int64_t h) -> double {
      if (format.scales == EPX_FLOAT32) return epx::reference::load(scales[rank], row, h / block);
      return std::ldexp(1.0, std::to_integer<int>(scales[rank].bytes[row * scales[rank].cols + h / block]) - 127);
    };
    epx::reference::combine_rank_major(plan, rows, out, &format);
    double nearest = 0.0;
    for (size_t home = 0; home < kRanks; ++home)
      for (int64_t token = 0; token < kTokens; ++token)
        for (int64_t h = 0; h < kHidden; ++h) {
          const int64_t row = static_cast<int64_t>(home) * kTokens + token;
          double sum = 0.0, bound = 0.0, magnitudes = 0.0;
          for (size_t rank = 0; rank < kRanks; ++rank) {
            const double partial = epx::reference::load(rows[rank], row, h);
            sum += partial;
            magnitudes += std::fabs(partial);
            bound += std::max(step * std::fabs(partial), least_step * scale_of(rank, row, h)) * (1.0 + 0x1p-16) + 0x1p-120;
          }
          bound += kRanks * 0x1p-24 * (magnitudes + bound); // of the sum at home
          const double error = std::fabs(epx::reference::load(out[home], token, h) - sum);
          REQUIRE(error <= bound);
          nearest = std::max(nearest, error / bound);
        }
    CHECK(nearest > 0.8);
  }
}
