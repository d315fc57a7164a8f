// SPDX-License-Identifier: Apache-2.0
// The dtypes that rows are computed in. Files that are compiled once per instruction set include this, and others; the functions
// are local to each of them, so that the linker merges none.
//
// They have no branches, so that loops over them vectorise. number() and round() are for a float or a register of them
// (formats::Lanes), whose bits are in the low part of a word; load() and store() are for one element.
#pragma once

#include <cstdint>

#include "epx/epx.h"
#include "runtime/formats/elements.h"

namespace epx::rows {
namespace {

using formats::bits_of;
using formats::float_of;
using formats::Lanes;

struct Float32 {
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7f800000;

  template <typename Number = float>
  static Number number(typename Lanes<Number>::Word x) {
    return float_of<Number>(x);
  }
  template <typename Number>
  static typename Lanes<Number>::Word round(Number x) {
    return bits_of(x);
  }
  static float load(Bits x) { return number(x); }
  static Bits store(float x) { return round(x); }
};

struct BFloat16 {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7f80;

  template <typename Number = float>
  static Number number(typename Lanes<Number>::Word x) {
    return float_of<Number>(x << 16);
  }
  template <typename Number>
  static typename Lanes<Number>::Word round(Number x) {
    using L = Lanes<Number>;
    const auto u = bits_of(x);
    const auto quiet_nan = (u | 0x400000u) >> 16;
    return L::where_less(L::fill(0x7f800000), u & 0x7fffffffu, quiet_nan, round_with_plain_nan(x));
  }
  // The same, but no NaN with the bits 0x7fff8000, whose payload could carry into the sign.
  template <typename Number>
  static typename Lanes<Number>::Word round_with_plain_nan(Number x) {
    const auto u = bits_of(x);
    return (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  }
  static float load(Bits x) { return number(x); }
  static Bits store(float x) { return static_cast<Bits>(round(x)); }
};

struct Float16 {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7c00;

  template <typename Number = float>
  static Number number(typename Lanes<Number>::Word x) {
    using L = Lanes<Number>;
    const auto magnitude = x & 0x7fffu;
    const auto sign = (x & 0x8000u) << 16;
    // Moves the exponent from bias 15 to bias 127 by an exact multiplication, which is right for subnormals too.
    const auto finite = bits_of(float_of<Number>(magnitude << 13) * 0x1p112f);
    const auto special = magnitude << 13 | 0x7f800000u; // infinity, NaN
    return float_of<Number>(sign | L::where_less(magnitude, L::fill(0x7c00), finite, special));
  }
  template <typename Number>
  static typename Lanes<Number>::Word round(Number x) {
    using L = Lanes<Number>;
    const auto u = bits_of(x);
    const auto sign = u >> 16 & 0x8000u;
    const auto magnitude = u & 0x7fffffffu;
    // A normal result rebiases the exponent and rounds to nearest even on the 13 bits that are cut. Overflow carries into
    // infinity.
    const auto normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    // For a subnormal result, adding 0.5 makes the float adder shift and round; its last place is then 2^-24.
    const auto subnormal = bits_of(float_of<Number>(magnitude) + 0.5f) - bits_of(0.5f);
    const auto special = L::where_less(L::fill(0x7f800000), magnitude, L::fill(0x7e00), L::fill(0x7c00));
    const auto finite = L::where_less(magnitude, L::fill(113u << 23), subnormal, normal);
    return sign | L::where_less(magnitude, L::fill(143u << 23), finite, special);
  }
  static float load(Bits x) { return number(x); }
  static Bits store(float x) { return static_cast<Bits>(round(x)); }
};

// Calls body(Format{}) for the dtype.
template <typename Body>
inline auto with_format(epx_dtype dtype, Body body) {
  if (dtype == EPX_FLOAT32) return body(Float32{});
  if (dtype == EPX_FLOAT16) return body(Float16{});
  return body(BFloat16{});
}

} // namespace
} // namespace epx::rows
