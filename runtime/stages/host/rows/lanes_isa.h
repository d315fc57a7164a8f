// SPDX-License-Identifier: Apache-2.0
// Loops over the elements of rows that use registers of floats, in files that are compiled once per instruction set. Without AVX2
// they are left to the compiler.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "runtime/formats/elements.h"

namespace epx::rows {
namespace {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#endif

#if defined(__AVX2__)
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using SignedWords = int32_t __attribute__((vector_size(4 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes)));
#endif

// load_words() widens elements to words. store_words() narrows words, whose upper bits are 0.
#if defined(__AVX512F__)
// GCC 12 warns of the intrinsics without a mask: they read a register that nothing has set. These become the same instructions.
inline constexpr __mmask16 kAll = 0xffff;

inline Words load_words(const uint32_t* x) {
  return reinterpret_cast<Words>(_mm512_loadu_si512(x));
}
inline Words load_words(const uint16_t* x) {
  const auto elements = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(x));
  return reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(kAll, elements));
}
inline Words load_words(const uint8_t* x) {
  const auto elements = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(x));
  return reinterpret_cast<Words>(_mm512_maskz_cvtepu8_epi32(kAll, elements));
}
inline void store_words(uint32_t* out, Words x) {
  _mm512_storeu_si512(out, reinterpret_cast<__m512i>(x));
}
inline void store_words(uint16_t* out, Words x) {
  const auto elements = _mm512_maskz_cvtepi32_epi16(kAll, reinterpret_cast<__m512i>(x));
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(out), elements);
}
inline void store_words(uint8_t* out, Words x) {
  const auto elements = _mm512_maskz_cvtepi32_epi8(kAll, reinterpret_cast<__m512i>(x));
  _mm_storeu_si128(reinterpret_cast<__m128i_u*>(out), elements);
}
#elif defined(__AVX2__)
inline Words load_words(const uint32_t* x) {
  return reinterpret_cast<Words>(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(x)));
}
inline Words load_words(const uint16_t* x) {
  const auto elements = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(x));
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(elements));
}
inline Words load_words(const uint8_t* x) {
  const auto elements = _mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(x));
  return reinterpret_cast<Words>(_mm256_cvtepu8_epi32(elements));
}
inline void store_words(uint32_t* out, Words x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(out), reinterpret_cast<__m256i>(x));
}
inline void store_words(uint16_t* out, Words x) {
  const auto halves = _mm256_packus_epi32(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(x));
  _mm_storeu_si128(reinterpret_cast<__m128i_u*>(out), _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
}
inline void store_words(uint8_t* out, Words x) {
  const auto halves = _mm256_packus_epi32(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(x));
  const auto bytes = _mm256_packus_epi16(halves, halves);
  const auto joined = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i_u*>(out), joined);
}
// The words of four registers.
inline void store_words(uint8_t* out, Words a, Words b, Words c, Words d) {
  const auto ab = _mm256_packus_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b));
  const auto cd = _mm256_packus_epi32(reinterpret_cast<__m256i>(c), reinterpret_cast<__m256i>(d));
  const auto abcd = _mm256_packus_epi16(ab, cd); // has the low halves of a, b, c, d, then the high ones
  const auto bytes = _mm256_permutevar8x32_epi32(abcd, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(out), bytes);
}
#endif

// Sets out[i] = f(number, in[i]), all widened to words: one by one, or a register of them. The number's type alone matters.
template <typename In, typename Out, typename Function>
inline void transform_elements(const In* in, Out* out, int count, Function f) {
  int i = 0;
#if defined(__AVX2__)
#if !defined(__AVX512F__)
  if constexpr (sizeof(Out) == 1) {
    for (; i + 4 * kLanes <= count; i += 4 * kLanes)
      store_words(out + i, f(Floats{}, load_words(in + i)), f(Floats{}, load_words(in + i + kLanes)),
                  f(Floats{}, load_words(in + i + 2 * kLanes)), f(Floats{}, load_words(in + i + 3 * kLanes)));
  }
#endif
  for (; i + kLanes <= count; i += kLanes)
    store_words(out + i, f(Floats{}, load_words(in + i)));
#endif
  for (; i < count; ++i)
    out[i] = static_cast<Out>(f(0.0f, static_cast<uint32_t>(in[i])));
}

// Returns the largest x[i] & mask.
template <typename Bits>
inline Bits largest_masked(const Bits* x, Bits mask, int64_t count) {
  Bits largest = 0;
  int64_t i = 0;
#if defined(__AVX2__) // GCC unrolls a loop over a block of 16 and then sees no vector in it
  if constexpr (sizeof(Bits) == 2) {
    auto all = _mm256_setzero_si256();
    for (; i + 16 <= count; i += 16) {
      const auto elements = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(x + i));
      all = _mm256_max_epu16(all, _mm256_and_si256(elements, _mm256_set1_epi16(static_cast<int16_t>(mask))));
    }
    const auto eight = _mm_max_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    const auto least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))); // of the complements
    largest = static_cast<Bits>(~_mm_extract_epi16(least, 0));
  }
#endif
  for (; i < count; ++i) {
    const Bits masked = x[i] & mask;
    largest = masked > largest ? masked : largest;
  }
  return largest;
}

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
};

} // namespace EPX_FORMATS_ISA
} // namespace epx::formats
#endif
