// SPDX-License-Identifier: Apache-2.0
// The types of quantised elements and of their scales: from float32 to codes and back, for host and device.
//
// The conversions are integer arithmetic and exact additions. So every processor gives the same bits, loops over them vectorise,
// and none of them depends on whether a processor flushes subnormal numbers.
#pragma once

#include <cstdint>

// Files that are compiled for several instruction sets have these functions in a namespace for each of them: the linker must not
// merge inline functions across instruction sets.
#if defined(EPX_ROWS_ISA)
#define EPX_FORMATS_ISA EPX_ROWS_ISA
#else
#define EPX_FORMATS_ISA any_isa
#endif

namespace epx::formats {
inline namespace EPX_FORMATS_ISA {

// The conversions are templates over what they compute with: a float, or a register of floats on processors that have them.
template <typename Number>
struct Lanes;

template <>
struct Lanes<float> {
  using Word = uint32_t;
  static constexpr uint32_t fill(uint32_t word) { return word; }
  static constexpr uint32_t min(uint32_t a, uint32_t b) { return where_less(a, b, a, b); }
  static constexpr uint32_t max(uint32_t a, uint32_t b) { return where_less(a, b, b, a); }
  // Returns the mask's bits from a, and the others from b.
  static constexpr uint32_t choose_bits(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }
  // Returns x where a < b, and else y. Here and above a and b are less than 2^31: SSE2 compares signed integers alone.
  static constexpr uint32_t where_less(uint32_t a, uint32_t b, uint32_t x, uint32_t y) {
    return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? x : y;
  }
};

template <typename Number>
constexpr auto bits_of(Number value) {
  return __builtin_bit_cast(typename Lanes<Number>::Word, value);
}

template <typename Number = float>
constexpr Number float_of(typename Lanes<Number>::Word bits) {
  return __builtin_bit_cast(Number, bits);
}

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNanBits = 0x7fc00000;
constexpr uint32_t kMagnitudeBits = 0x7fffffff;
constexpr float kFloatMax = 0x1.fffffep127f;

// A type's codes have a sign, then the exponent, then the mantissa.
struct E4M3 {
  static constexpr int kBits = 8;
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr uint32_t kLargestCode = 0x7e;
  static constexpr float kLargest = 448.0f;
};

struct E5M2 {
  static constexpr int kBits = 8;
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr uint32_t kLargestCode = 0x7b;
  static constexpr float kLargest = 57344.0f;
  static constexpr uint32_t kInfinityCode = 0x7c;
};

struct E2M1 {
  static constexpr int kBits = 4;
  static constexpr int kMantissaBits = 1;
  static constexpr int kBias = 1;
  static constexpr uint32_t kLargestCode = 0x7;
  static constexpr float kLargest = 6.0f;
};

constexpr uint32_t kNanCode = 0x7f; // of E4M3 and E5M2, for NaNs of both signs: what GPUs convert a NaN to

// Returns the type's code for a number: to nearest even, and the largest number for what is too large, infinity too.
template <typename Type, typename Number>
constexpr auto encode_saturating(Number value) {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  constexpr int kShift = 23 - Type::kMantissaBits;
  constexpr uint32_t kLeastNormal = static_cast<uint32_t>(128 - Type::kBias) << 23;
  constexpr uint32_t kSign = 1u << (Type::kBits - 1);

  const Word bits = bits_of(value);
  const Word magnitude = L::min(bits & kMagnitudeBits, L::fill(bits_of(Type::kLargest)));
  const Word exponent = L::max(magnitude & kInfinityBits, L::fill(kLeastNormal)); // at least that of the type's subnormals
  // The last place of this power of two is the type's. So the addition rounds the number to it, and the sum's low bits count the
  // last places: the mantissa, with 1 << kMantissaBits for a normal number, which the exponent's field is short of.
  const Number rounder = float_of<Number>(exponent + (static_cast<uint32_t>(kShift) << 23));
  const Word last_places = bits_of(float_of<Number>(magnitude) + rounder);
  const Word code = last_places + (exponent >> kShift) - (kLeastNormal >> kShift); // and bits above
  return L::choose_bits(kSign - 1, code, bits >> (32 - Type::kBits));
}

// Returns the code of an element: as encode_saturating(), but what is not finite becomes the type's NaN; E5M2 keeps infinities.
// E2M1 has no code for them: see BlockScale.
template <typename Type, typename Number>
constexpr auto encode(Number value) {
  static_assert(Type::kBits == 8);
  using L = Lanes<Number>;
  using Word = typename L::Word;
  const Word bits = bits_of(value);
  const Word magnitude = bits & kMagnitudeBits;
  Word special = L::fill(kNanCode);
  if constexpr (requires { Type::kInfinityCode; }) {
    const Word infinity = (bits >> 24 & 0x80u) | Type::kInfinityCode;
    special = L::where_less(L::fill(kInfinityBits), magnitude, special, infinity);
  }
  return L::where_less(magnitude, L::fill(kInfinityBits), encode_saturating<Type>(value), special);
}

// Returns the number that a code stands for. Bits above the type's do not matter.
template <typename Type, typename Number = float>
constexpr Number decode(typename Lanes<Number>::Word code) {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  constexpr int kShift = 23 - Type::kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Type::kBias) << 23;
  constexpr uint32_t kLeastNormal = static_cast<uint32_t>(128 - Type::kBias) << 23;
  constexpr uint32_t kSign = 1u << (Type::kBits - 1);

  const Word magnitude = code & (kSign - 1);
  const Word shifted = magnitude << kShift;
  const Word subnormal = bits_of(float_of<Number>(shifted + kLeastNormal) - float_of<Number>(L::fill(kLeastNormal)));
  Word bits = L::where_less(magnitude, L::fill(1u << Type::kMantissaBits), subnormal, shifted + kRebias);
  if constexpr (Type::kBits == 8) {
    Word special = L::fill(kNanBits);
    if constexpr (requires { Type::kInfinityCode; }) special = shifted | kInfinityBits;
    bits = L::where_less(L::fill(Type::kLargestCode), magnitude, special, bits);
  }
  return float_of<Number>(bits | (code & kSign) << (32 - Type::kBits));
}

// Returns 2^(byte - 127), NaN for 255. Byte 0 is a subnormal float32.
constexpr float decode_e8m0(uint32_t byte) {
  return float_of(byte == 0 ? 1u << 22 : byte == 255 ? kNanBits : byte << 23);
}

// Returns 2^(127 - byte), which float32 has for all bytes but 255.
constexpr float reciprocal_of_e8m0(uint32_t byte) {
  return float_of(byte == 254 ? 1u << 22 : (254 - byte) << 23);
}

// Returns the E8M0 byte of the least power of two that is not below `value` >= 0, as cvt.rp.satfinite.ue8m0x2.f32 does.
constexpr uint32_t encode_e8m0_up(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7fffff;
  const bool up = exponent == 0 ? mantissa > 1u << 22 : mantissa != 0; // byte 0 is the middle of the subnormals
  if (bits >= kInfinityBits) return bits > kInfinityBits ? 255 : 254;
  return exponent + (up && exponent < 254 ? 1 : 0);
}

// Returns the same of a quotient as DeepGEMM has it: the byte is from 1 to 254, so the power is a normal float32.
constexpr uint32_t encode_normal_e8m0_up(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t byte = (bits >> 23) + ((bits & 0x7fffff) != 0 ? 1 : 0);
  return byte < 1 ? 1 : byte > 254 ? 254 : byte;
}

} // namespace EPX_FORMATS_ISA
} // namespace epx::formats
