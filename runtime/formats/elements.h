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
  // Return the bound for a NaN, as fminf and fmaxf do.
  static constexpr float at_most(float value, float bound) { return value < bound ? value : bound; }
  static constexpr float at_least(float value, float bound) { return value > bound ? value : bound; }
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

// The two steps of encode_saturating(). Some processors have an instruction that does the second one for several numbers.
template <typename Type>
struct Rounding {
  static constexpr int kShift = 23 - Type::kMantissaBits;
  static constexpr uint32_t kLeastNormal = static_cast<uint32_t>(128 - Type::kBias) << 23;
  // What code() makes of the exponent that the type's least normal number has in sum().
  static constexpr uint32_t kOffset = (kLeastNormal + (static_cast<uint32_t>(kShift) << 23)) >> kShift;
  static_assert(kOffset % 2 == 0);

  // `magnitude` is at most Type::kLargest but for a rounding error. The last place of the power of two that is added is the
  // type's. So the addition rounds to nearest even, and the low 16 bits of the sum count last places. They start at -kOffset, an
  // even number, which is added to the power.
  template <typename Number>
  static constexpr auto sum(Number magnitude) {
    using L = Lanes<Number>;
    const auto exponent =
        L::max(bits_of(magnitude) & kInfinityBits, L::fill(kLeastNormal)); // of a subnormal number, at least
    const auto power = exponent + ((static_cast<uint32_t>(kShift) << 23) + (0x10000 - kOffset));
    return bits_of(magnitude + float_of<Number>(power));
  }
  // The code is in the low 16 bits.
  template <typename Word>
  static constexpr Word code(Word sum) {
    return sum + (sum >> kShift);
  }
};

// Returns the type's code for a number: to nearest even, and the largest number for what is too large, infinity too.
template <typename Type, typename Number>
constexpr auto encode_saturating(Number value) {
  using L = Lanes<Number>;
  const auto bits = bits_of(value);
  const auto magnitude = L::min(bits & kMagnitudeBits, L::fill(bits_of(Type::kLargest)));
  const auto code = Rounding<Type>::code(Rounding<Type>::sum(float_of<Number>(magnitude)));
  return L::choose_bits((1u << (Type::kBits - 1)) - 1, code, bits >> (32 - Type::kBits));
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

// Returns the bits of the number that a code without its sign stands for, if that is finite.
template <typename Type, typename Number>
constexpr auto decode_magnitude(typename Lanes<Number>::Word code) {
  using L = Lanes<Number>;
  constexpr int kShift = 23 - Type::kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Type::kBias) << 23;
  constexpr uint32_t kLeastNormal = static_cast<uint32_t>(128 - Type::kBias) << 23;
  const auto shifted = code << kShift;
  const auto subnormal = bits_of(float_of<Number>(shifted + kLeastNormal) - float_of<Number>(L::fill(kLeastNormal)));
  return L::where_less(code, L::fill(1u << Type::kMantissaBits), subnormal, shifted + kRebias);
}

// Returns the number that a code stands for. Bits above the type's do not matter.
template <typename Type, typename Number = float>
constexpr Number decode(typename Lanes<Number>::Word code) {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  constexpr uint32_t kSign = 1u << (Type::kBits - 1);

  const Word magnitude = code & (kSign - 1);
  Word bits = decode_magnitude<Type, Number>(magnitude);
  if constexpr (Type::kBits == 8) {
    Word special = L::fill(kNanBits);
    if constexpr (requires { Type::kInfinityCode; }) special = magnitude << (23 - Type::kMantissaBits) | kInfinityBits;
    bits = L::where_less(L::fill(Type::kLargestCode), magnitude, special, bits);
  }
  return float_of<Number>(bits | (code & kSign) << (32 - Type::kBits));
}

// Returns 2^(byte - 127), NaN for 255. Byte 0 is a subnormal float32.
template <typename Number = float>
constexpr Number decode_e8m0(typename Lanes<Number>::Word byte) {
  using L = Lanes<Number>;
  return float_of<Number>(L::where_less(L::fill(254), byte, L::fill(kNanBits), L::max(byte << 23, L::fill(1u << 22))));
}

// Returns 2^(127 - byte), which float32 has for all bytes but 255.
template <typename Number = float>
constexpr Number reciprocal_of_e8m0(typename Lanes<Number>::Word byte) {
  using L = Lanes<Number>;
  return float_of<Number>(L::max((254 - byte) << 23, L::fill(1u << 22)));
}

// Returns the E8M0 byte of the least power of two that is not below `value` >= 0, as cvt.rp.satfinite.ue8m0x2.f32 does.
template <typename Number>
constexpr auto encode_e8m0_up(Number value) {
  using L = Lanes<Number>;
  const auto bits = bits_of(value);
  // A mantissa above 0 carries into the exponent; below the normal numbers one above the middle, which byte 0 stands for.
  const auto carry = L::where_less(bits, L::fill(1u << 23), L::fill((1u << 22) - 1), L::fill((1u << 23) - 1));
  return L::where_less(L::fill(kInfinityBits), bits, L::fill(255), L::min((bits + carry) >> 23, L::fill(254)));
}

// Returns the same of a quotient as DeepGEMM has it: the byte is from 1 to 254, so the power is a normal float32.
template <typename Number>
constexpr auto encode_normal_e8m0_up(Number value) {
  using L = Lanes<Number>;
  return L::max(L::min((bits_of(value) + 0x7fffffu) >> 23, L::fill(254)), L::fill(1));
}

} // namespace EPX_FORMATS_ISA
} // namespace epx::formats
