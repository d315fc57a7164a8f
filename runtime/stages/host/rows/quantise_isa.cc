// SPDX-License-Identifier: Apache-2.0
// This file is compiled once per instruction set, as rows_isa.cc is and with the same restriction. So it uses WireFormat's fields
// and none of its functions.
#include "runtime/stages/host/rows/quantise_isa.h"

#include <type_traits>

#include "runtime/formats/elements.h"
#include "runtime/formats/scaling.h"
#include "runtime/stages/host/rows/lanes_isa.h"
#include "runtime/stages/host/rows/row_types_isa.h"

namespace epx::rows {
namespace {

using formats::BlockScale;
using formats::E2M1;
using formats::E4M3;
using formats::E5M2;

// A scaling S has
//   S::Element, S::kScales, S::kBlock   type of elements, dtype of scales, elements of a block
//   scale(amax, finite)                 returns the scales of kLanes blocks; finite: 1 where all elements are, else 0

template <typename ElementType, epx_dtype kScaleType, int kBlockSize>
struct Scaling {
  using Element = ElementType;
  static constexpr epx_dtype kScales = kScaleType;
  static constexpr int kBlock = kBlockSize;
};

struct Block128 : Scaling<E4M3, EPX_FLOAT32, 128> {
  float amax_floor;
  BlockScale<Floats> scale(Floats amax, Words) const { return formats::scale_block128(amax, amax_floor); }
};
template <epx_dtype kScaleType>
struct Block128Pow2 : Scaling<E4M3, kScaleType, 128> {
  float amax_floor;
  BlockScale<Floats> scale(Floats amax, Words) const {
    return formats::scale_block128_pow2(amax, amax_floor, kScaleType == EPX_FLOAT8_E8M0);
  }
};
template <typename ElementType>
struct Mx : Scaling<ElementType, EPX_FLOAT8_E8M0, 32> {
  BlockScale<Floats> scale(Floats amax, Words) const { return formats::scale_mx<ElementType>(amax); }
};
struct Nv : Scaling<E2M1, EPX_FLOAT8_E4M3, 16> {
  float encode_scale;
  BlockScale<Floats> scale(Floats amax, Words finite) const { return formats::scale_nv(amax, finite, encode_scale); }
};

// Calls body(S) with the scaling of the format. encode_scale is NV's.
template <typename Body>
inline void with_scaling(const WireFormat& format, float encode_scale, Body body) {
  if (format.scaling == EPX_SCALING_NV)
    body(Nv{{}, encode_scale});
  else if (format.scaling == EPX_SCALING_MX && format.elements == EPX_FLOAT8_E5M2)
    body(Mx<E5M2>{});
  else if (format.scaling == EPX_SCALING_MX)
    body(Mx<E4M3>{});
  else if (format.scaling == EPX_SCALING_BLOCK128)
    body(Block128{{}, format.amax_floor});
  else if (format.scales == EPX_FLOAT32)
    body(Block128Pow2<EPX_FLOAT32>{{}, format.amax_floor});
  else
    body(Block128Pow2<EPX_FLOAT8_E8M0>{{}, format.amax_floor});
}

// Rows are handled a chunk at a time: its elements stay in the cache, and the scales of its blocks, with two divisions one after
// the other for each, are computed as vectors. The last chunk of a row is completed with zeros, which have no part in an amax.
constexpr int kChunk = 1024; // elements; whole blocks of every scaling, eight at least

template <typename S>
constexpr int kChunkBlocks = kChunk / S::kBlock < kLanes ? kLanes : kChunk / S::kBlock; // whole registers
template <typename S>
using Stored = std::conditional_t<S::kScales == EPX_FLOAT32, uint32_t, uint8_t>;

constexpr int blocks_of(int count, int block) {
  return (count + block - 1) / block;
}
// Return the bytes that `count` elements from the start of a block have.
template <typename S>
constexpr int code_bytes(int count) {
  return (count * S::Element::kBits + 7) / 8;
}
template <typename S>
constexpr int scale_bytes(int count) {
  return blocks_of(count, S::kBlock) * static_cast<int>(sizeof(Stored<S>));
}

template <typename Format>
constexpr auto kMagnitude = static_cast<typename Format::Bits>(static_cast<typename Format::Bits>(-1) / 2);

// Returns the largest finite magnitude. Magnitudes of finite numbers are in the order of their bits, so integers are compared.
template <typename Format>
inline float find_finite_amax(const typename Format::Bits* x, int64_t count) {
  using Bits = typename Format::Bits;
  Bits largest = largest_masked(x, kMagnitude<Format>, count);
  if (largest < Format::kInfinity) return Format::load(largest);
  largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits magnitude = x[i] & kMagnitude<Format>;
    const Bits finite = magnitude < Format::kInfinity ? magnitude : Bits{0};
    largest = finite > largest ? finite : largest;
  }
  return Format::load(largest);
}

// Writes the codes of a block whose elements are not all finite, or whose multiplier is 0, which only NV has.
template <typename Format, typename S>
void encode_special_block(const typename Format::Bits* x, float multiplier, uint8_t* codes) {
  using Element = typename S::Element;
  if constexpr (Element::kBits == 4) { // of NV: the multiplier is 0
    __builtin_memset(codes, 0, S::kBlock / 2);
  } else {
    for (int i = 0; i < S::kBlock; ++i)
      codes[i] = static_cast<uint8_t>(formats::encode<Element>(Format::load(x[i]) * multiplier));
  }
}

// Quantises `count` elements, at most kChunk. What is read and written are whole groups of them and 8 or 16 blocks.
template <typename Format, typename S>
inline void quantise_chunk(const S& scaling, const typename Format::Bits* x, int count, uint8_t* codes, Stored<S>* scales) {
  using Element = typename S::Element;
  using L = formats::Lanes<Floats>;
  constexpr int kMaxBlocks = kChunk / S::kBlock, kStep = kMaxBlocks < 16 ? kMaxBlocks : 16;
  const int num_blocks = blocks_of(count, kStep * S::kBlock) * kStep;
  uint32_t largest[kChunkBlocks<S>], finite[kChunkBlocks<S>];
  float amax[kChunkBlocks<S>];
  if constexpr (kMaxBlocks < kLanes) __builtin_memset(largest, 0, sizeof(largest));
  find_block_maxima<S::kBlock>(x, kMagnitude<Format>, num_blocks, largest);
  Words special{}; // blocks that have an element that is not finite, or the multiplier 0
  for (int block = 0; block < num_blocks; block += kLanes) {
    const auto bits = load_register<Words>(largest + block);
    const Words is_finite = L::where_less(bits, L::fill(Format::kInfinity), L::fill(1), L::fill(0));
    store_register(finite + block, is_finite);
    store_register(amax + block, Format::template number<Floats>(bits));
    special |= is_finite ^ 1u;
  }
  if (has_bits(special))
    for (int block = 0; block < num_blocks; ++block)
      if (finite[block] == 0) amax[block] = find_finite_amax<Format>(x + block * S::kBlock, S::kBlock);

  float multipliers[kChunkBlocks<S>];
  uint32_t stored[kChunkBlocks<S>];
  for (int block = 0; block < num_blocks; block += kLanes) {
    const auto scale = scaling.scale(load_register<Floats>(amax + block), load_register<Words>(finite + block));
    store_register(multipliers + block, scale.multiplier);
    store_register(stored + block, scale.stored);
    special |= L::where_less(formats::bits_of(scale.multiplier), L::fill(1), L::fill(1), L::fill(0));
  }
  for (int block = 0; block < num_blocks; ++block)
    scales[block] = static_cast<Stored<S>>(stored[block]);

  for (int start = 0; start < count; start += kGroup) {
    Floats numbers[kRegisters];
    const float* const group_multipliers = multipliers + start / S::kBlock;
    for (int i = 0; i < kRegisters; ++i)
      numbers[i] = load_floats(Format{}, x + start + i * kLanes) * group_multipliers[i * kLanes / S::kBlock];
    encode_group<Element>(numbers, codes + code_bytes<S>(start));
  }
  if (has_bits(special))
    for (int block = 0; block < num_blocks; ++block)
      if (finite[block] == 0 || multipliers[block] == 0.0f)
        encode_special_block<Format, S>(x + block * S::kBlock, multipliers[block],
                                        codes + block * code_bytes<S>(S::kBlock));
}

template <typename Format, typename S>
[[gnu::flatten]] void quantise_row(const S& scaling, const typename Format::Bits* x, int64_t hidden, uint8_t* codes,
                                   std::byte* scales) {
  typename Format::Bits padded[kChunk];
  uint8_t padded_codes[code_bytes<S>(kChunk)];
  Stored<S> chunk_scales[kChunkBlocks<S>];
  for (int64_t start = 0; start < hidden; start += kChunk, x += kChunk, codes += code_bytes<S>(kChunk)) {
    const auto count = static_cast<int>(hidden - start < kChunk ? hidden - start : kChunk);
    const bool is_whole = count == kChunk;
    if (!is_whole) {
      __builtin_memset(padded, 0, sizeof(padded));
      __builtin_memcpy(padded, x, static_cast<size_t>(count) * sizeof(*x));
    }
    quantise_chunk<Format>(scaling, is_whole ? x : padded, count, is_whole ? codes : padded_codes, chunk_scales);
    if (!is_whole) __builtin_memcpy(codes, padded_codes, static_cast<size_t>(code_bytes<S>(count)));
    const int size = scale_bytes<S>(count);
    __builtin_memcpy(scales, chunk_scales, static_cast<size_t>(size));
    scales += size;
  }
}

// Returns the number, and the same NaN for every NaN. So products have no NaN but such as BFloat16::round_with_plain_nan() takes.
template <typename Number>
inline Number plain_nan(Number value) {
  using L = formats::Lanes<Number>;
  const auto bits = formats::bits_of(value);
  return formats::float_of<Number>(
      L::where_less(L::fill(formats::kInfinityBits), bits & formats::kMagnitudeBits, L::fill(formats::kNanBits), bits));
}

// Dequantises `count` elements, at most kChunk. What is read and written are whole groups of them.
template <typename Format, typename S>
inline void dequantise_chunk(const uint8_t* codes, const Stored<S>* scales, float row_scale, float weight, int count,
                             typename Format::Bits* out) {
  using Element = typename S::Element;
  uint32_t stored[kChunkBlocks<S>] = {};
  for (int block = 0; block < blocks_of(count, S::kBlock); ++block)
    stored[block] = scales[block];
  float values[kChunkBlocks<S>];
  for (int block = 0; block < kChunkBlocks<S>; block += kLanes) {
    const auto value = formats::scale_value<Floats>(S::kScales, load_register<Words>(stored + block), row_scale);
    store_register(values + block, plain_nan(value));
  }
  for (int start = 0; start < count; start += kGroup) {
    Floats numbers[kRegisters];
    decode_group<Element>(codes + code_bytes<S>(start), numbers);
    const float* const group_values = values + start / S::kBlock;
    for (int i = 0; i < kRegisters; ++i)
      numbers[i] = numbers[i] * group_values[i * kLanes / S::kBlock] * weight;
    store_group(Format{}, out + start, numbers);
  }
}

template <typename Format, typename S>
[[gnu::flatten]] void dequantise_row(const uint8_t* codes, const std::byte* scales, float row_scale, float weight,
                                     int64_t hidden, typename Format::Bits* out) {
  uint8_t padded_codes[code_bytes<S>(kChunk)] = {};
  typename Format::Bits padded[kChunk];
  Stored<S> chunk_scales[kChunkBlocks<S>] = {};
  for (int64_t start = 0; start < hidden; start += kChunk, out += kChunk, codes += code_bytes<S>(kChunk)) {
    const auto count = static_cast<int>(hidden - start < kChunk ? hidden - start : kChunk);
    const bool is_whole = count == kChunk;
    const int size = scale_bytes<S>(count);
    __builtin_memcpy(chunk_scales, scales, static_cast<size_t>(size));
    scales += size;
    if (!is_whole) __builtin_memcpy(padded_codes, codes, static_cast<size_t>(code_bytes<S>(count)));
    dequantise_chunk<Format, S>(is_whole ? codes : padded_codes, chunk_scales, row_scale, weight, count,
                                is_whole ? out : padded);
    if (!is_whole) __builtin_memcpy(out, padded, static_cast<size_t>(count) * sizeof(*out));
  }
}

} // namespace

inline namespace EPX_ROWS_ISA {

void quantise(const WireFormat& format, epx_dtype in, const std::byte* row, int64_t hidden, const float* encode_scale,
              std::byte* elements, std::byte* scales, float* row_scale) {
  with_format(in, [&](auto type) {
    using Format = decltype(type);
    const auto* x = reinterpret_cast<const typename Format::Bits*>(row);
    float e = 1.0f;
    if (format.scaling == EPX_SCALING_NV) {
      e = encode_scale != nullptr ? *encode_scale : formats::nv_encode_scale(find_finite_amax<Format>(x, hidden));
      *row_scale = formats::nv_row_scale(e);
    }
    with_scaling(format, e, [&](auto scaling) {
      quantise_row<Format>(scaling, x, hidden, reinterpret_cast<uint8_t*>(elements), scales);
    });
  });
}

void dequantise(const WireFormat& format, epx_dtype out, const std::byte* elements, const std::byte* scales,
                float row_scale, const float* weight, int64_t hidden, std::byte* row) {
  with_format(out, [&](auto type) {
    using Format = decltype(type);
    with_scaling(format, 1.0f, [&](auto scaling) {
      dequantise_row<Format, decltype(scaling)>(reinterpret_cast<const uint8_t*>(elements), scales, row_scale,
                                                weight != nullptr ? plain_nan(*weight) : 1.0f /* exact */, hidden,
                                                reinterpret_cast<typename Format::Bits*>(row));
    });
  });
}

} // namespace EPX_ROWS_ISA
} // namespace epx::rows
