// SPDX-License-Identifier: Apache-2.0
// The scales of blocks and rows, for host and device, as epx.h defines them: every operation is one float32 operation, rounded to
// nearest even. Elements are encode(x * multiplier). The scalings are templates over what they compute with, as the conversions
// of elements.h are.
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
template <typename Number>
struct BlockScale {
  Number multiplier;
  typename Lanes<Number>::Word stored; // bits of a float32, or the code of E8M0 or E4M3 in the low byte
};

template <typename Number>
constexpr BlockScale<Number> scale_block128(Number amax, float amax_floor) {
  using L = Lanes<Number>;
  const Number a = L::at_least(amax, amax_floor);
  const auto scale = L::where_less(bits_of(a), L::fill(1), L::fill(bits_of(1.0f)), bits_of(a / E4M3::kLargest)); // 1 for 0
  return {L::at_most(1.0f / float_of<Number>(scale), kFloatMax), scale};
}

// The scales are float32, or E8M0. The quotient by a power of two is the product with its reciprocal, rounded alike.
template <typename Number>
constexpr BlockScale<Number> scale_block128_pow2(Number amax, float amax_floor, bool e8m0) {
  using L = Lanes<Number>;
  const Number a = L::at_least(amax, amax_floor);
  const auto byte = L::where_less(bits_of(a), L::fill(1), L::fill(127), encode_normal_e8m0_up(a / E4M3::kLargest));
  return {reciprocal_of_e8m0<Number>(byte), e8m0 ? byte : byte << 23};
}

template <typename Type, typename Number>
constexpr BlockScale<Number> scale_mx(Number amax) {
  const auto byte = encode_e8m0_up(amax * (1.0f / Type::kLargest));
  return {reciprocal_of_e8m0<Number>(byte), byte};
}

// `finite`: 1 if all elements of the block are, else 0. encode_scale is positive and finite.
template <typename Number>
constexpr BlockScale<Number> scale_nv(Number amax, typename Lanes<Number>::Word finite, float encode_scale) {
  using L = Lanes<Number>;
  using Rounded = Rounding<E4M3>;
  const Number wanted = L::at_most(amax * (encode_scale * (1.0f / E2M1::kLargest)), E4M3::kLargest);
  const auto code = Rounded::code(Rounded::sum(wanted)) & 0x7fu;
  const auto divisor = float_of<Number>(decode_magnitude<E4M3, Number>(L::max(code, L::fill(1))));
  const Number multiplier = L::at_most(encode_scale / divisor, kFloatMax);
  const auto has_codes = L::min(code, finite);
  return {float_of<Number>(L::where_less(L::fill(0), has_codes, bits_of(multiplier), L::fill(0))),
          L::where_less(L::fill(0), finite, code, L::fill(kNanCode))};
}

// Returns the scale of a block whose largest finite magnitude is amax. The last two arguments are NV's.
constexpr BlockScale<float> scale_block(const WireFormat& format, float amax, bool finite, float encode_scale) {
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
  return row_amax == 0.0f ? 1.0f : Lanes<float>::at_most(E4M3::kLargest * E2M1::kLargest / row_amax, kFloatMax);
}

// Returns the scale of a row of NV.
constexpr float nv_row_scale(float encode_scale) {
  return 1.0f / encode_scale;
}

// Returns what the elements of a block are multiplied by to be dequantised. row_scale is NV's.
template <typename Number = float>
constexpr Number scale_value(epx_dtype scales, typename Lanes<Number>::Word stored, float row_scale) {
  if (scales == EPX_FLOAT32) return float_of<Number>(stored);
  if (scales == EPX_FLOAT8_E8M0) return decode_e8m0<Number>(stored & 0xff);
  return decode<E4M3, Number>(stored & 0xff) * row_scale;
}

} // namespace EPX_FORMATS_ISA
} // namespace epx::formats
