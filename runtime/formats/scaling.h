// SPDX-License-Identifier: Apache-2.0
// The scales of blocks and rows, for host and device, as epx.h defines them: every operation is one float32 operation, rounded to
// nearest even. Elements are encode(x * multiplier).
#pragma once

#include <cstdint>

#include "epx/epx.h"
#include "runtime/formats/elements.h"
#include "runtime/formats/row_format.h"

namespace epx::formats {
inline namespace EPX_FORMATS_ISA {

// How a block is quantised. A finite element times the multiplier overflows in NV alone, where the code saturates; so in the
// others a product is finite where its element is. In NV a multiplier of 0 makes every code of the block 0, without a sign,
// whatever its elements are.
struct BlockScale {
  float multiplier;
  uint32_t stored; // bits of a float32, or the code of E8M0 or E4M3 in the low byte
};

// Returns at most FLT_MAX, also for NaN, as fminf does.
constexpr float at_most_float_max(float value) {
  return value < kFloatMax ? value : kFloatMax;
}

constexpr BlockScale scale_block128(float amax, float amax_floor) {
  const float a = amax < amax_floor ? amax_floor : amax;
  if (a == 0.0f) return {1.0f, bits_of(1.0f)};
  const float scale = a / E4M3::kLargest;
  return {at_most_float_max(1.0f / scale), bits_of(scale)};
}

// The scales are float32, or E8M0. The quotient by a power of two is the product with its reciprocal, rounded alike.
constexpr BlockScale scale_block128_pow2(float amax, float amax_floor, bool e8m0) {
  const float a = amax < amax_floor ? amax_floor : amax;
  const uint32_t byte = a == 0.0f ? 127 : encode_normal_e8m0_up(a / E4M3::kLargest);
  return {reciprocal_of_e8m0(byte), e8m0 ? byte : byte << 23};
}

template <typename Type>
constexpr BlockScale scale_mx(float amax) {
  const uint32_t byte = encode_e8m0_up(amax * (1.0f / Type::kLargest));
  return {reciprocal_of_e8m0(byte), byte};
}

// `finite`: whether all elements of the block are. encode_scale is positive and finite.
constexpr BlockScale scale_nv(float amax, bool finite, float encode_scale) {
  const uint32_t code = encode_saturating<E4M3>(at_most_float_max(amax * (encode_scale * (1.0f / E2M1::kLargest))));
  const float multiplier = at_most_float_max(encode_scale / decode<E4M3>(code == 0 ? 1 : code));
  return {code == 0 || !finite ? 0.0f : multiplier, finite ? code : kNanCode};
}

// Returns the scale of a block whose largest finite magnitude is amax. The last two arguments are NV's.
constexpr BlockScale scale_block(const WireFormat& format, float amax, bool finite, float encode_scale) {
  switch (format.scaling) {
  case EPX_SCALING_BLOCK128:
    return scale_block128(amax, format.amax_floor);
  case EPX_SCALING_BLOCK128_POW2:
    return scale_block128_pow2(amax, format.amax_floor, format.scales == EPX_FLOAT8_E8M0);
  case EPX_SCALING_MX:
    return format.elements == EPX_FLOAT8_E5M2 ? scale_mx<E5M2>(amax) : scale_mx<E4M3>(amax);
  case EPX_SCALING_NV:
    return scale_nv(amax, finite, encode_scale);
  case EPX_SCALING_NONE:
    break;
  }
  return {1.0f, 0};
}

// Returns e of a row of NV from its largest finite magnitude.
constexpr float nv_encode_scale(float row_amax) {
  return row_amax == 0.0f ? 1.0f : at_most_float_max(E4M3::kLargest * E2M1::kLargest / row_amax);
}

// Returns the scale of a row of NV.
constexpr float nv_row_scale(float encode_scale) {
  return 1.0f / encode_scale;
}

// Returns what the elements of a block are multiplied by to be dequantised. row_scale is NV's.
constexpr float scale_value(epx_dtype scales, uint32_t stored, float row_scale) {
  if (scales == EPX_FLOAT32) return float_of(stored);
  if (scales == EPX_FLOAT8_E8M0) return decode_e8m0(stored & 0xff);
  return decode<E4M3>(stored & 0xff) * row_scale;
}

} // namespace EPX_FORMATS_ISA
} // namespace epx::formats
