// SPDX-License-Identifier: Apache-2.0
// This file is compiled once per instruction set, as rows_isa.cc is and with the same restriction. So it uses WireFormat's fields
// and none of its functions.
#include "runtime/stages/host/rows/quantise_isa.h"

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

struct Amax {
  float value;
  bool finite; // whether all elements are
};

// The magnitudes of finite numbers are in the order of their bits, so integers are compared, as many as a register holds.
template <typename Format>
inline Amax find_amax(const typename Format::Bits* x, int64_t count) {
  using Bits = typename Format::Bits;
  constexpr auto kMagnitude = static_cast<Bits>((Bits{1} << (8 * sizeof(Bits) - 1)) - 1);
  Bits largest = largest_masked(x, kMagnitude, count);
  if (largest < Format::kInfinity) return {Format::load(largest), true};
  largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits magnitude = x[i] & kMagnitude;
    const Bits finite = magnitude < Format::kInfinity ? magnitude : Bits{0};
    largest = finite > largest ? finite : largest;
  }
  return {Format::load(largest), false};
}

template <typename Format, typename Element>
inline void encode_block(const typename Format::Bits* x, bool finite, float multiplier, uint8_t* codes, int count) {
  if (Element::kBits == 4 || finite) {
    transform_elements(x, codes, count, [multiplier](auto number, auto word) {
      number = Format::template number<decltype(number)>(word) * multiplier;
      return formats::encode_saturating<Element>(number);
    });
  } else if constexpr (Element::kBits == 8) {
    transform_elements(x, codes, count, [multiplier](auto number, auto word) {
      number = Format::template number<decltype(number)>(word) * multiplier;
      return formats::encode<Element>(number);
    });
  }
}

// The even index is in the low nibble.
inline void pack_nibbles(const uint8_t* codes, uint8_t* packed, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i)
    packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

inline void unpack_nibbles(const uint8_t* packed, uint8_t* codes, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    codes[2 * i] = packed[i] & 0xf;
    codes[2 * i + 1] = packed[i] >> 4;
  }
}

inline void store_scale(std::byte* scales, int64_t index, bool is_float, uint32_t stored) {
  if (is_float)
    __builtin_memcpy(scales + 4 * index, &stored, 4);
  else
    scales[index] = static_cast<std::byte>(stored);
}

inline uint32_t load_scale(const std::byte* scales, int64_t index, bool is_float) {
  if (!is_float) return static_cast<uint32_t>(scales[index]);
  uint32_t stored;
  __builtin_memcpy(&stored, scales + 4 * index, 4);
  return stored;
}

// Calls body(start, count) for every block of `count` elements. All but the last have a constant size, with which loops over them
// are unrolled.
template <int kBlock, typename Body>
inline void for_each_block(int64_t count, Body body) {
  int64_t start = 0;
  for (; start + kBlock <= count; start += kBlock)
    body(start, kBlock);
  if (start < count) body(start, static_cast<int>(count - start));
}

// Blocks are handled so many at a time: a block's scale takes two divisions one after the other, and those of several blocks
// overlap. The functions that do so have everything inlined (flatten), so that a block's constant size reaches the loops.
constexpr int kBlocksAtATime = 64;

template <typename Format, typename Element, int kBlock>
[[gnu::flatten]] void quantise_blocks(const WireFormat& format, const typename Format::Bits* x, int count,
                                      float encode_scale, uint8_t* codes, std::byte* scales) {
  float amax[kBlocksAtATime];
  uint32_t finite[kBlocksAtATime]; // bool, as wide as the floats that loops handle with it
  for_each_block<kBlock>(count, [&](int64_t start, int size) {
    const Amax found = find_amax<Format>(x + start, size);
    amax[start / kBlock] = found.value;
    finite[start / kBlock] = found.finite ? 1 : 0;
  });
  float multipliers[kBlocksAtATime];
  uint32_t stored[kBlocksAtATime];
  const int num_blocks = (count + kBlock - 1) / kBlock;
  for (int block = 0; block < num_blocks; ++block) {
    BlockScale scale;
    if constexpr (Element::kBits == 4) // without the switch of scale_block(), so that the loop vectorises
      scale = formats::scale_nv(amax[block], finite[block] != 0, encode_scale);
    else
      scale = formats::scale_block(format, amax[block], finite[block] != 0, encode_scale);
    multipliers[block] = scale.multiplier;
    stored[block] = scale.stored;
  }
  for (int block = 0; block < num_blocks; ++block)
    store_scale(scales, block, format.scales == EPX_FLOAT32, stored[block]);
  if constexpr (Element::kBits == 4) {
    uint8_t unpacked[kBlocksAtATime * kBlock];
    for_each_block<kBlock>(count, [&](int64_t start, int size) {
      const float multiplier = multipliers[start / kBlock];
      if (multiplier != 0.0f)
        encode_block<Format, Element>(x + start, true, multiplier, unpacked + start, size);
      else
        __builtin_memset(unpacked + start, 0, static_cast<size_t>(size));
    });
    if (count % 2 != 0) unpacked[count] = 0;
    pack_nibbles(unpacked, codes, (count + 1) / 2);
  } else {
    for_each_block<kBlock>(count, [&](int64_t start, int size) {
      const int64_t block = start / kBlock;
      encode_block<Format, Element>(x + start, finite[block] != 0, multipliers[block], codes + start, size);
    });
  }
}

template <typename Format, typename Element, int kBlock>
void quantise_row(const WireFormat& format, const std::byte* row, int64_t hidden, float encode_scale, std::byte* elements,
                  std::byte* scales) {
  const auto* x = reinterpret_cast<const typename Format::Bits*>(row);
  auto* codes = reinterpret_cast<uint8_t*>(elements);
  const int64_t scale_size = format.scales == EPX_FLOAT32 ? 4 : 1;
  for_each_block<kBlocksAtATime * kBlock>(hidden, [&](int64_t start, int count) {
    quantise_blocks<Format, Element, kBlock>(format, x + start, count, encode_scale, codes + start * Element::kBits / 8,
                                             scales + start / kBlock * scale_size);
  });
}

template <typename Format, typename Element, int kBlock>
[[gnu::flatten]] void dequantise_row(const WireFormat& format, const std::byte* elements, const std::byte* scales,
                                     float row_scale, const float* weight, int64_t hidden, std::byte* row) {
  auto* out = reinterpret_cast<typename Format::Bits*>(row);
  const auto* all_codes = reinterpret_cast<const uint8_t*>(elements);
  for_each_block<kBlocksAtATime * kBlock>(hidden, [&](int64_t chunk, int chunk_size) {
    uint8_t unpacked[Element::kBits == 4 ? kBlocksAtATime * kBlock : 1];
    const uint8_t* codes = all_codes + chunk;
    if constexpr (Element::kBits == 4) {
      unpack_nibbles(all_codes + chunk / 2, unpacked, (chunk_size + 1) / 2);
      codes = unpacked;
    }
    for_each_block<kBlock>(chunk_size, [&](int64_t start, int size) {
      const uint32_t stored = load_scale(scales, (chunk + start) / kBlock, format.scales == EPX_FLOAT32);
      const float scale = formats::scale_value(format.scales, stored, row_scale);
      if (weight == nullptr)
        transform_elements(codes + start, out + chunk + start, size, [scale](auto number, auto code) {
          number = formats::decode<Element, decltype(number)>(code) * scale;
          return Format::round(number);
        });
      else
        transform_elements(codes + start, out + chunk + start, size, [scale, factor = *weight](auto number, auto code) {
          number = formats::decode<Element, decltype(number)>(code) * scale * factor;
          return Format::round(number);
        });
    });
  });
}

} // namespace

inline namespace EPX_ROWS_ISA {

void quantise(const WireFormat& format, epx_dtype in, const std::byte* row, int64_t hidden, const float* encode_scale,
              std::byte* elements, std::byte* scales, float* row_scale) {
  with_format(in, [&](auto type) {
    using Format = decltype(type);
    if (format.scaling == EPX_SCALING_NV) {
      const auto* x = reinterpret_cast<const typename Format::Bits*>(row);
      const float e =
          encode_scale != nullptr ? *encode_scale : formats::nv_encode_scale(find_amax<Format>(x, hidden).value);
      *row_scale = formats::nv_row_scale(e);
      quantise_row<Format, E2M1, 16>(format, row, hidden, e, elements, scales);
    } else if (format.scaling == EPX_SCALING_MX) {
      if (format.elements == EPX_FLOAT8_E5M2)
        quantise_row<Format, E5M2, 32>(format, row, hidden, 1.0f, elements, scales);
      else
        quantise_row<Format, E4M3, 32>(format, row, hidden, 1.0f, elements, scales);
    } else {
      quantise_row<Format, E4M3, 128>(format, row, hidden, 1.0f, elements, scales);
    }
  });
}

void dequantise(const WireFormat& format, epx_dtype out, const std::byte* elements, const std::byte* scales,
                float row_scale, const float* weight, int64_t hidden, std::byte* row) {
  with_format(out, [&](auto type) {
    using Format = decltype(type);
    if (format.scaling == EPX_SCALING_NV)
      dequantise_row<Format, E2M1, 16>(format, elements, scales, row_scale, weight, hidden, row);
    else if (format.scaling != EPX_SCALING_MX)
      dequantise_row<Format, E4M3, 128>(format, elements, scales, row_scale, weight, hidden, row);
    else if (format.elements == EPX_FLOAT8_E5M2)
      dequantise_row<Format, E5M2, 32>(format, elements, scales, row_scale, weight, hidden, row);
    else
      dequantise_row<Format, E4M3, 32>(format, elements, scales, row_scale, weight, hidden, row);
  });
}

} // namespace EPX_ROWS_ISA
} // namespace epx::rows
