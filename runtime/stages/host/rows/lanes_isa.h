// SPDX-License-Identifier: Apache-2.0
// Elements of rows in registers of floats, in files that are compiled once per instruction set. Without AVX2 a register is one
// float, and vectors are left to the compiler.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <type_traits>

#include "runtime/formats/elements.h"
#include "runtime/stages/host/rows/row_types_isa.h"

namespace epx::rows {
namespace {

#if defined(__AVX512F__)
inline constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int64_t kLanes = 8;
#else
inline constexpr int64_t kLanes = 1;
#endif
inline constexpr int kGroup = 32; // elements that are converted at a time, so that whole registers of codes are stored
inline constexpr int64_t kRegisters = kGroup / kLanes;

#if defined(__AVX2__)
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using SignedWords = int32_t __attribute__((vector_size(4 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes)));
#else
using Words = uint32_t;
using Floats = float;
#endif

} // namespace
} // namespace epx::rows

#if defined(__AVX2__)
namespace epx::formats {
inline namespace EPX_FORMATS_ISA {

template <>
struct Lanes<rows::Floats> {
  using Word = rows::Words;
  static Word fill(uint32_t word) { return Word{} + word; }
  static Word min(Word a, Word b) { return a < b ? a : b; }
  static Word max(Word a, Word b) { return a > b ? a : b; }
  static Word choose_bits(uint32_t mask, Word a, Word b) {
#if defined(__AVX512F__) // one instruction, which compilers miss
    constexpr int kFirstChooses = 0xca;
    return reinterpret_cast<Word>(_mm512_ternarylogic_epi32(
        reinterpret_cast<__m512i>(fill(mask)), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b), kFirstChooses));
#else
    return (a & mask) | (b & ~mask);
#endif
  }
  static Word where_less(Word a, Word b, Word x, Word y) {
    return reinterpret_cast<rows::SignedWords>(a) < reinterpret_cast<rows::SignedWords>(b) ? x : y;
  }
  static rows::Floats at_most(rows::Floats value, float bound) {
    const rows::Floats bounds = rows::Floats{} + bound;
    return value < bounds ? value : bounds;
  }
  static rows::Floats at_least(rows::Floats value, float bound) {
    const rows::Floats bounds = rows::Floats{} + bound;
    return value > bounds ? value : bounds;
  }
};

} // namespace EPX_FORMATS_ISA
} // namespace epx::formats
#endif

namespace epx::rows {
namespace {

template <typename Register, typename T>
inline Register load_register(const T* from) {
  Register value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}
template <typename Register, typename T>
inline void store_register(T* to, Register value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

inline bool has_bits(Words words) {
  uint32_t lanes[kLanes], all = 0;
  store_register(lanes, words);
  for (const uint32_t lane : lanes)
    all |= lane;
  return all != 0;
}

// load_floats() returns the numbers of a register of elements. A group's numbers are in kRegisters registers. encode_group()
// stores their codes, and decode_group() sets them to what codes stand for. Two codes of 4 bits are in a byte, the even index in
// the low nibble. store_group() rounds numbers to a dtype. Their NaNs are such as BFloat16::round_with_plain_nan() takes.

#if defined(__AVX2__)
inline constexpr int16_t kPairWeights = 0x1001; // of an even and of an odd code, in bytes
#endif

#if defined(__AVX512F__)
// GCC 12 warns of the intrinsics without a mask: they read a register that nothing has set. These become the same instructions.
inline constexpr __mmask16 kAll = 0xffff;

inline Floats load_floats(BFloat16, const uint16_t* x) {
  const auto words = reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(kAll, load_register<__m256i>(x)));
  return reinterpret_cast<Floats>(words << 16);
}
inline Floats load_floats(Float16, const uint16_t* x) {
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(kAll, load_register<__m256i>(x)));
}
inline void store_group(BFloat16, uint16_t* out, const Floats (&x)[kRegisters]) {
  for (int i = 0; i < kRegisters; ++i) {
    const auto words = reinterpret_cast<__m512i>(BFloat16::round_with_plain_nan(x[i]));
    store_register(out + i * kLanes, _mm512_maskz_cvtepi32_epi16(kAll, words));
  }
}
inline void store_group(Float16, uint16_t* out, const Floats (&x)[kRegisters]) {
  for (int i = 0; i < kRegisters; ++i)
    store_register(out + i * kLanes,
                   _mm512_maskz_cvtps_ph(kAll, reinterpret_cast<__m512>(x[i]), _MM_FROUND_TO_NEAREST_INT));
}
inline void widen_halves(__m256i halves, Floats* x) {
  x[0] = reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(kAll, halves));
}

template <typename Element>
inline void encode_group(const Floats (&x)[kRegisters], uint8_t* out) {
  const auto codes = [&](int i) {
    return _mm512_maskz_cvtepi32_epi8(kAll, reinterpret_cast<__m512i>(formats::encode_saturating<Element>(x[i])));
  };
  const auto both = _mm256_inserti128_si256(_mm256_castsi128_si256(codes(0)), codes(1), 1);
  if constexpr (Element::kBits == 8) {
    store_register(out, both);
  } else {
    const auto pairs = _mm256_maddubs_epi16(both, _mm256_set1_epi16(kPairWeights));
    store_register(out, _mm256_maskz_cvtepi16_epi8(kAll, pairs));
  }
}
#elif defined(__AVX2__)
inline Floats load_floats(BFloat16, const uint16_t* x) {
  const auto places = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1, -1, 10, 11,
                                       -1, -1, 12, 13, -1, -1, 14, 15);
  const auto elements = _mm256_broadcastsi128_si256(load_register<__m128i>(x));
  return reinterpret_cast<Floats>(_mm256_shuffle_epi8(elements, places));
}
inline Floats load_floats(Float16, const uint16_t* x) {
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(load_register<__m128i>(x)));
}
inline void store_group(BFloat16, uint16_t* out, const Floats (&x)[kRegisters]) {
  for (int i = 0; i < kRegisters; i += 2) {
    const auto halves = _mm256_packus_epi32(reinterpret_cast<__m256i>(BFloat16::round_with_plain_nan(x[i])),
                                            reinterpret_cast<__m256i>(BFloat16::round_with_plain_nan(x[i + 1])));
    store_register(out + i * kLanes, _mm256_permute4x64_epi64(halves, 0xd8));
  }
}
inline void store_group(Float16, uint16_t* out, const Floats (&x)[kRegisters]) {
  for (int i = 0; i < kRegisters; ++i)
    store_register(out + i * kLanes, _mm256_cvtps_ph(reinterpret_cast<__m256>(x[i]), _MM_FROUND_TO_NEAREST_INT));
}
inline void widen_halves(__m256i halves, Floats* x) {
  x[0] = reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  x[1] = reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}

template <typename Element>
inline void encode_group(const Floats (&x)[kRegisters], uint8_t* out) {
  using Rounding = formats::Rounding<Element>;
  using L = formats::Lanes<Floats>;
  constexpr int kUnit = 1 << (Rounding::kShift - 16); // the code's exponent has it in the high half of a sum
  // Multiplies the signed halves of a sum by kUnit and 1, and adds the products: kUnit times the code.
  const auto multipliers = _mm256_set1_epi32(1 << 16 | kUnit);
  const auto magnitude = [&](int i) {
    Words bits = formats::bits_of(x[i]) & formats::kMagnitudeBits;
    if constexpr (Element::kBits == 4) bits = L::min(bits, L::fill(formats::bits_of(Element::kLargest)));
    return _mm256_madd_epi16(reinterpret_cast<__m256i>(Rounding::sum(formats::float_of<Floats>(bits))), multipliers);
  };
  const auto magnitudes = [&](int i) {
    return _mm256_srli_epi16(_mm256_packus_epi32(magnitude(i), magnitude(i + 1)), Rounding::kShift - 16);
  };
  const auto signs = [&](int i) { // saturates, and keeps the sign
    return _mm256_packs_epi32(reinterpret_cast<__m256i>(x[i]), reinterpret_cast<__m256i>(x[i + 1]));
  };
  auto sign = _mm256_packs_epi16(signs(0), signs(2));
  if constexpr (Element::kBits == 4) sign = _mm256_srli_epi16(sign, 4);
  sign = _mm256_and_si256(sign, _mm256_set1_epi8(static_cast<char>(1 << (Element::kBits - 1))));
  const auto codes = _mm256_or_si256(_mm256_packus_epi16(magnitudes(0), magnitudes(2)), sign);
  // These are the codes of the registers' low halves, then those of the high ones.
  if constexpr (Element::kBits == 8) {
    store_register(out, _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  } else {
    const auto pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(kPairWeights));
    const auto bytes = _mm256_packus_epi16(pairs, pairs);
    store_register(out, _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
  }
}
#endif

#if defined(__AVX2__)
inline Floats load_floats(Float32, const uint32_t* x) {
  return load_register<Floats>(x);
}
inline void store_group(Float32, uint32_t* out, const Floats (&x)[kRegisters]) {
  for (int i = 0; i < kRegisters; ++i) // a copy of the array would have it in memory
    store_register(out + i * kLanes, x[i]);
}

// The codes are made into float16, which has the exponent of E5M2: E4M3's numbers have 2^-8 of their value there.
template <typename Element>
inline void decode_group(const uint8_t* codes, Floats (&x)[kRegisters]) {
  __m128i bytes[2];
  if constexpr (Element::kBits == 8) {
    bytes[0] = load_register<__m128i>(codes);
    bytes[1] = load_register<__m128i>(codes + 16);
  } else {
    // E5M2's codes of E2M1's numbers
    const auto e5m2 =
        _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -0x80, -0x48, -0x44, -0x42, -0x40, -0x3e, -0x3c, -0x3a);
    const auto pairs = load_register<__m128i>(codes), nibble = _mm_set1_epi8(0xf);
    const auto even = _mm_shuffle_epi8(e5m2, _mm_and_si128(pairs, nibble));
    const auto odd = _mm_shuffle_epi8(e5m2, _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble));
    bytes[0] = _mm_unpacklo_epi8(even, odd);
    bytes[1] = _mm_unpackhi_epi8(even, odd);
  }
  for (int i = 0; i < 2; ++i) {
    auto halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes[i]), 8);
    if constexpr (std::is_same_v<Element, formats::E4M3>) {
      const auto sign = _mm256_and_si256(halves, _mm256_set1_epi16(INT16_MIN));
      const auto magnitude = _mm256_and_si256(_mm256_srli_epi16(halves, 1), _mm256_set1_epi16(0x3f80));
      const auto is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
      halves = _mm256_or_si256(_mm256_or_si256(magnitude, sign), _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
    }
    widen_halves(halves, x + i * kRegisters / 2);
  }
  if constexpr (std::is_same_v<Element, formats::E4M3>)
    for (Floats& register_ : x)
      register_ *= 0x1p8f;
}
#else
template <typename Format>
inline float load_floats(Format, const typename Format::Bits* x) {
  return Format::load(*x);
}
template <typename Format>
inline void store_group(Format, typename Format::Bits* out, const float (&x)[kRegisters]) {
  for (int i = 0; i < kGroup; ++i)
    out[i] = Format::store(x[i]);
}

template <typename Element>
inline void encode_group(const float (&x)[kRegisters], uint8_t* out) {
  if constexpr (Element::kBits == 8) {
    for (int i = 0; i < kGroup; ++i)
      out[i] = static_cast<uint8_t>(formats::encode_saturating<Element>(x[i]));
  } else {
    for (int i = 0; i < kGroup; i += 2)
      out[i / 2] = static_cast<uint8_t>(formats::encode_saturating<Element>(x[i]) |
                                        formats::encode_saturating<Element>(x[i + 1]) << 4);
  }
}

template <typename Element>
inline void decode_group(const uint8_t* codes, float (&x)[kRegisters]) {
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t code = Element::kBits == 8 ? codes[i] : static_cast<uint32_t>(codes[i / 2] >> (i % 2 * 4));
    x[i] = formats::decode<Element>(code);
  }
}
#endif

// Returns the largest x[i] & mask.
template <typename Bits>
inline Bits largest_masked(const Bits* x, Bits mask, int64_t count) {
  Bits largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits masked = x[i] & mask;
    largest = masked > largest ? masked : largest;
  }
  return largest;
}

// Sets largest[b] to the largest x[i] & mask of block b, which has kBlock elements. num_blocks is a multiple of 8.
template <int kBlock, typename Bits>
inline void find_block_maxima(const Bits* x, Bits mask, int num_blocks, uint32_t* largest) {
#if defined(__AVX2__)
  // The elements of a block are compared until they fill one register of words, then those of eight blocks are transposed.
  constexpr int kStep = 32 / static_cast<int>(sizeof(Bits));
  const auto max = [](__m256i a, __m256i b) { return sizeof(Bits) == 2 ? _mm256_max_epu16(a, b) : _mm256_max_epu32(a, b); };
  const auto all =
      sizeof(Bits) == 2 ? _mm256_set1_epi16(static_cast<int16_t>(mask)) : _mm256_set1_epi32(static_cast<int>(mask));
  const auto of_block = [&](int block) {
    auto most = _mm256_setzero_si256();
    for (int i = 0; i < kBlock; i += kStep) {
      most = max(most, _mm256_and_si256(load_register<__m256i>(x + block * kBlock + i), all));
    }
    return most;
  };
  const auto of_two = [&](int block) {
    const auto a = of_block(block), b = of_block(block + 1);
    return max(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  };
  const auto of_four = [&](int block) {
    const auto a = of_two(block), b = of_two(block + 2);
    return max(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  };
  for (int block = 0; block < num_blocks; block += 8) {
    const auto a = of_four(block), b = of_four(block + 4);
    auto most = max(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
    if constexpr (sizeof(Bits) == 2)
      most = _mm256_and_si256(max(most, _mm256_srli_epi32(most, 16)), _mm256_set1_epi32(0xffff));
    store_register(largest + block, most);
  }
#else
  for (int block = 0; block < num_blocks; ++block)
    largest[block] = largest_masked(x + block * kBlock, mask, kBlock);
#endif
}

} // namespace
} // namespace epx::rows
