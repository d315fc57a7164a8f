// SPDX-License-Identifier: Apache-2.0
// One warp quantises, dequantises and copies rows of 8 or 4 bits, as epx.h defines them (runtime/formats/). A lane has 16
// neighbouring elements of each tile of 512, so that a block's elements are in one lane or in neighbouring ones, and the amax of a
// block takes a few shuffles. These rows go from registers to memory; quantised_stage.cuh quantises rows that are aligned and
// finite. Of rows that are copied, only the scales are copied here.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH__)
#include <cuda_fp8.h>
#endif

#include "base/device/warp.cuh"
#include "runtime/formats/elements.h"
#include "runtime/formats/row_format.h"
#include "runtime/formats/scale_layout.h"
#include "runtime/formats/scaling.h"
#include "runtime/stages/cuda/rows/fragments.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"

namespace epx::cuda {

constexpr int kLaneElements = 16;
constexpr int kQuantisedTile = kLaneElements * kWarp; // elements

// Where a lane's quantised row goes.
struct QuantisedPlace {
  std::byte* row = nullptr;    // NULL: nowhere
  std::byte* scales = nullptr; // its first one, in the layout of the scales; NULL: nowhere, and the row is dequantised
  float* row_scale = nullptr;  // NULL: it has none
};

// The places of a warp's row: scales lie as `layout` says at those of the lanes `kept`, which are receive tensors of this rank,
// and as in WireRow at the others, which are in staging.
struct QuantisedPlaces {
  QuantisedPlace own;
  ScaleLayout layout;
  unsigned kept;

  // Calls take(layout, lanes) for the lanes, of those that `lanes` has, whose scales lie alike.
  template <typename Take>
  __device__ void for_each_layout(unsigned lanes, const Take& take) const {
#pragma unroll 1
    for (unsigned left = lanes; left != 0;) {
      const unsigned staged = left & ~kept;
      const unsigned now = staged != 0 ? staged : left;
      take(staged != 0 ? layout.of_wire() : layout, now);
      left &= ~now;
    }
  }
};

// Where a quantised row comes from.
struct QuantisedSource {
  const std::byte* row;
  const std::byte* scales; // [S]
  float row_scale;
};

// What the row of a lane's place is multiplied by where it lands: nothing, or a number of the lane's own.
struct NoWeight {};
struct PlaceWeight {
  float value;
};
__device__ inline float times_weight_of_lane(float x, PlaceWeight own, int lane) {
  return x * from_lane(own.value, lane);
}

// A lane's elements of a tile. Loops over them are unrolled, since what is indexed at run time lies in local memory.
template <typename T>
struct LaneWords {
  static constexpr int kWords = kLaneElements * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];

  __device__ void unpack(float (&x)[kLaneElements]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      unpack_word<T>(words[i], x + i * kElementsPerWord<T>);
  }
  __device__ void pack(const float (&x)[kLaneElements]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = pack_word<T>(x + i * kElementsPerWord<T>);
  }
  // What the row does not have is 0. kIsVector: the address of h is aligned to 16 bytes, and the row has all or none of the
  // lane's elements.
  template <bool kIsVector>
  __device__ void load(const T* row, int64_t h, int64_t hidden) {
    if constexpr (kIsVector) {
      uint4 vectors[kWords / 4] = {};
      if (h < hidden) {
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i)
          vectors[i] = reinterpret_cast<const uint4*>(row + h)[i];
      }
      memcpy(words, vectors, sizeof(words));
    } else {
      T elements[kLaneElements];
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i)
        elements[i] = h + i < hidden ? row[h + i] : T(0.0f);
      memcpy(words, elements, sizeof(words));
    }
  }
  template <bool kIsVector>
  __device__ void store(T* row, int64_t h, int64_t hidden) const {
    if constexpr (kIsVector) {
      if (h >= hidden) return;
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i)
        reinterpret_cast<uint4*>(row + h)[i] = uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    } else {
      T elements[kLaneElements];
      memcpy(static_cast<void*>(elements), words, sizeof(words));
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i)
        if (h + i < hidden) row[h + i] = elements[i];
    }
  }
};

// The codes of a lane's elements of a tile: 16 bytes, or 8 of E2M1.
struct LaneCodes {
  uint32_t words[4];

  // kIsVector: as in LaneWords, with an address that is aligned to the codes of a lane.
  template <bool kIsVector>
  __device__ void load(const std::byte* row, int64_t h, int64_t hidden, int per_byte) {
    const int64_t first = h >> (per_byte - 1), bytes = (hidden + per_byte - 1) >> (per_byte - 1); // of one or of two
    words[0] = words[1] = words[2] = words[3] = 0;
    if constexpr (kIsVector) {
      if (h >= hidden) return;
      if (per_byte == 1)
        memcpy(words, reinterpret_cast<const uint4*>(row + first), sizeof(uint4));
      else
        memcpy(words, reinterpret_cast<const uint2*>(row + first), sizeof(uint2));
    } else {
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i)
        if (i < kLaneElements / per_byte && first + i < bytes)
          words[i / 4] |= static_cast<uint32_t>(row[first + i]) << (8 * (i % 4));
    }
  }
  template <bool kIsVector>
  __device__ void store(std::byte* row, int64_t h, int64_t hidden, int per_byte) const {
    const int64_t first = h >> (per_byte - 1), bytes = (hidden + per_byte - 1) >> (per_byte - 1);
    if constexpr (kIsVector) {
      if (h >= hidden) return;
      if (per_byte == 1)
        *reinterpret_cast<uint4*>(row + first) = uint4{words[0], words[1], words[2], words[3]};
      else
        *reinterpret_cast<uint2*>(row + first) = uint2{words[0], words[1]};
    } else {
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i)
        if (i < kLaneElements / per_byte && first + i < bytes)
          row[first + i] = static_cast<std::byte>(words[i / 4] >> (8 * (i % 4)));
    }
  }
};

// Element by element. It is not inlined, since the loops that quantise have to fit into the instruction cache.
template <typename Type>
__device__ __noinline__ uint32_t encode_four_by_one(float4 x) {
  return formats::encode<Type>(x.x) | formats::encode<Type>(x.y) << 8 | formats::encode<Type>(x.z) << 16 |
         formats::encode<Type>(x.w) << 24;
}

template <typename Type>
__device__ inline uint32_t encode_four(const float* x, float multiplier, [[maybe_unused]] bool is_finite) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if (is_finite) { // the instruction makes the largest number of an infinity
    constexpr auto kType = std::is_same_v<Type, formats::E4M3> ? __NV_E4M3 : __NV_E5M2;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(float2{x[0] * multiplier, x[1] * multiplier}, __NV_SATFINITE, kType);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(float2{x[2] * multiplier, x[3] * multiplier}, __NV_SATFINITE, kType);
    return low | high << 16;
  }
#endif
  return encode_four_by_one<Type>(float4{x[0] * multiplier, x[1] * multiplier, x[2] * multiplier, x[3] * multiplier});
}

// The numbers of the two codes in the low half of a word.
template <typename Type>
__device__ inline float2 decode_two(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  constexpr auto kType = std::is_same_v<Type, formats::E4M3> ? __NV_E4M3 : __NV_E5M2;
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), kType)));
#else
  return {formats::decode<Type>(codes & 0xff), formats::decode<Type>(codes >> 8 & 0xff)};
#endif
}

__device__ inline uint32_t magnitude_if_finite(float x) {
  const uint32_t magnitude = formats::bits_of(x) & formats::kMagnitudeBits;
  return magnitude < formats::kInfinityBits ? magnitude : 0;
}

// Returns the codes of a lane's elements of a tile, and the stored scale of their block. All lanes call this.
__device__ inline LaneCodes quantise_lane(const WireFormat& format, const float (&x)[kLaneElements], float encode_scale,
                                          uint32_t& stored_scale) {
  uint32_t amax = 0;
  bool is_finite = true;
#pragma unroll
  for (float value : x) {
    const uint32_t magnitude = formats::bits_of(value) & formats::kMagnitudeBits;
    is_finite &= magnitude < formats::kInfinityBits;
    amax = max(amax, magnitude < formats::kInfinityBits ? magnitude : 0);
  }
  for (int distance = 1; distance < format.block() / kLaneElements; distance *= 2)
    amax = max(amax, __shfl_xor_sync(~0u, amax, distance));
  const formats::BlockScale scale =
      formats::scale_block(format, formats::float_of(amax), is_finite, encode_scale); // a block of NV is in one lane
  stored_scale = scale.stored;
  LaneCodes codes{};
  if (format.elements == EPX_FLOAT4_E2M1) {
    if (scale.multiplier == 0.0f) return codes;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      codes.words[i / 8] |= formats::encode_saturating<formats::E2M1>(x[i] * scale.multiplier) << (4 * (i % 8));
  } else if (format.elements == EPX_FLOAT8_E5M2) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      codes.words[i] = encode_four<formats::E5M2>(x + 4 * i, scale.multiplier, is_finite);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      codes.words[i] = encode_four<formats::E4M3>(x + 4 * i, scale.multiplier, is_finite);
  }
  return codes;
}

// Returns what a lane's codes stand for.
template <typename Type>
__device__ inline void decode_lane(const LaneCodes& codes, float scale, float (&x)[kLaneElements]) {
#pragma unroll
  for (int i = 0; i < kLaneElements; i += 2) {
    const float2 two = decode_two<Type>(codes.words[i / 4] >> (8 * (i % 4)) & 0xffff);
    x[i] = two.x * scale;
    x[i + 1] = two.y * scale;
  }
}
__device__ inline void dequantise_lane(const WireFormat& format, const LaneCodes& codes, float scale,
                                       float (&x)[kLaneElements]) {
  if (format.elements == EPX_FLOAT8_E4M3) {
    decode_lane<formats::E4M3>(codes, scale, x);
  } else if (format.elements == EPX_FLOAT8_E5M2) {
    decode_lane<formats::E5M2>(codes, scale, x);
  } else {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      x[i] = formats::decode<formats::E2M1>(codes.words[i / 8] >> (4 * (i % 8))) * scale;
  }
}

__device__ inline void store_scale(std::byte* to, int bytes, uint32_t stored) {
  if (bytes == 4)
    *reinterpret_cast<uint32_t*>(to) = stored;
  else
    *to = static_cast<std::byte>(stored);
}
__device__ inline uint32_t load_scale(const std::byte* from, int bytes) {
  return bytes == 4 ? *reinterpret_cast<const uint32_t*>(from) : static_cast<uint32_t>(*from);
}

// Stores the fill behind the scales of the rows that the lanes pass.
__device__ inline void store_scale_fill(const ScaleLayout& layout, unsigned lanes, std::byte* scales) {
  for (int64_t place = layout.num_scales + lane(); place - lane() < layout.places();
       place += kWarp) // the same in all lanes
    for (unsigned left = lanes; left != 0; left &= left - 1)
      if (std::byte* const to = from_lane(scales, lowest_bit(left)); place < layout.places())
        to[layout.place_offset(place)] = std::byte{0};
}

// Returns e of a row of NV. All lanes call this.
template <typename T, bool kIsVector>
__device__ __noinline__ float own_encode_scale_of(const T* row, int64_t hidden) {
  constexpr int kTiles = kIsVector ? 4 : 1; // whose loads are in flight at a time
  uint32_t amax = 0;
#pragma unroll 1
  for (int64_t first = 0; first < hidden; first += kTiles * kQuantisedTile) {
    LaneWords<T> words[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      words[i].template load<kIsVector>(row, first + i * kQuantisedTile + lane() * kLaneElements, hidden);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float x[kLaneElements];
      words[i].unpack(x);
#pragma unroll
      for (float value : x)
        amax = max(amax, magnitude_if_finite(value));
    }
  }
  return formats::nv_encode_scale(formats::float_of(__reduce_max_sync(~0u, amax)));
}
// Returns e of a row of NV: the caller's, or the row's own; 1 in other formats. All lanes call this.
template <typename T, bool kIsVector>
__device__ inline float encode_scale_of(const WireFormat& format, const T* row, int64_t hidden, const float* encode_scale) {
  if (!format.has_row_scale()) return 1.0f;
  return encode_scale != nullptr ? *encode_scale : own_encode_scale_of<T, kIsVector>(row, hidden);
}

// Quantises a row, or a part of one, to the places of the lanes that `lanes` has, which have no scales where the row is
// dequantised again. Its elements may be anything. e: encode_scale_of() the row. All lanes call this.
template <typename T, bool kIsVector>
__device__ __noinline__ void quantise_row(const WireFormat format, const T* row, int64_t hidden, float e,
                                          const ScaleLayout layout, const QuantisedPlace own, unsigned lanes) {
  const bool dequantises = from_lane(own.scales, lowest_bit(lanes)) == nullptr;
  const int per_byte = static_cast<int>(elements_per_byte(format.elements));
  const float row_scale = formats::nv_row_scale(e);
  const int block_shift = format.block_shift();
  LaneWords<T> next;
  if constexpr (kIsVector) next.template load<true>(row, lane() * kLaneElements, hidden);
#pragma unroll 1
  for (int64_t tile = 0; tile < hidden; tile += kQuantisedTile) {
    const int64_t h = tile + lane() * kLaneElements;
    LaneWords<T> words;
    if constexpr (kIsVector) {
      words = next;
      next.template load<true>(row, h + kQuantisedTile, hidden); // is in flight meanwhile
    } else {
      words.template load<false>(row, h, hidden);
    }
    float x[kLaneElements];
    words.unpack(x);
    uint32_t stored = 0;
    const LaneCodes codes = quantise_lane(format, x, e, stored);
    if (dequantises) {
      dequantise_lane(format, codes, formats::scale_value(format.scales, stored, row_scale), x);
      words.pack(x);
    }
    const bool stores_scale = !dequantises && (h & (format.block() - 1)) == 0 && h < hidden;
    const int64_t scale_offset = layout.place_offset(h >> block_shift);
#pragma unroll 1
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      std::byte* const to = from_lane(own.row, lowest_bit(left));
      std::byte* const scales = from_lane(own.scales, lowest_bit(left));
      if (dequantises)
        words.template store<kIsVector>(reinterpret_cast<T*>(to), h, hidden);
      else
        codes.template store<kIsVector>(to, h, hidden, per_byte);
      if (stores_scale) store_scale(scales + scale_offset, layout.scale_bytes, stored);
    }
  }
  if (dequantises) return;
  store_scale_fill(layout, lanes, own.scales);
  if (own.row_scale != nullptr && own.row != nullptr) *own.row_scale = row_scale;
}

template <typename T, bool kIsVector, typename Weight>
__device__ __noinline__ void dequantise_row(const WireFormat format, const QuantisedSource from, int64_t hidden, T* own,
                                            Weight weight, unsigned lanes) {
  constexpr int kTiles = kIsVector ? 2 : 1; // whose loads are in flight at a time
  const int per_byte = static_cast<int>(elements_per_byte(format.elements));
  const int scale_bytes = static_cast<int>(single_element_bytes(format.scales));
  const int block_shift = format.block_shift();
#pragma unroll 1
  for (int64_t first = 0; first < hidden; first += kTiles * kQuantisedTile) {
    LaneCodes codes[kTiles];
    uint32_t stored[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int64_t h = first + i * kQuantisedTile + lane() * kLaneElements;
      codes[i].template load<kIsVector>(from.row, h, hidden, per_byte);
      stored[i] = h < hidden ? load_scale(from.scales + (h >> block_shift) * scale_bytes, scale_bytes) : 0;
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int64_t h = first + i * kQuantisedTile + lane() * kLaneElements;
      float x[kLaneElements];
      dequantise_lane(format, codes[i], formats::scale_value(format.scales, stored[i], from.row_scale), x);
      LaneWords<T> words;
      if constexpr (std::is_same_v<Weight, NoWeight>) words.pack(x);
#pragma unroll 1
      for (unsigned left = lanes; left != 0; left &= left - 1) {
        if constexpr (!std::is_same_v<Weight, NoWeight>) {
          float weighted[kLaneElements];
#pragma unroll
          for (int element = 0; element < kLaneElements; ++element)
            weighted[element] = times_weight_of_lane(x[element], weight, lowest_bit(left));
          words.pack(weighted);
        }
        words.template store<kIsVector>(from_lane(own, lowest_bit(left)), h, hidden);
      }
    }
  }
}

// Returns the number of a code of the format, without its scale.
__device__ inline float decode_element(const WireFormat& format, uint32_t code) {
  if (format.elements == EPX_FLOAT8_E4M3) return formats::decode<formats::E4M3>(code);
  if (format.elements == EPX_FLOAT8_E5M2) return formats::decode<formats::E5M2>(code);
  return formats::decode<formats::E2M1>(code);
}

// Returns the dot product of a quantised row and x, by the fixed tree (reduce_tree). All lanes call this.
template <typename T>
__device__ __noinline__ float dot_row(const WireFormat format, const QuantisedSource from, int64_t hidden, const T* x) {
  const bool is_packed = format.elements == EPX_FLOAT4_E2M1;
  const int scale_bytes = static_cast<int>(single_element_bytes(format.scales));
  const int block_shift = format.block_shift();
  float acc[kFragment] = {};
#pragma unroll 1
  for (int64_t h = lane() * kFragment; h < hidden; h += kWarpTile) {
    // A lane's elements are of one block.
    const uint32_t stored = load_scale(from.scales + (h >> block_shift) * scale_bytes, scale_bytes);
    const float scale = formats::scale_value(format.scales, stored, from.row_scale);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (h + i >= hidden) break;
      const auto byte = static_cast<uint32_t>(from.row[is_packed ? (h + i) / 2 : h + i]);
      const uint32_t code = is_packed ? byte >> ((h + i) % 2 * 4) & 0xf : byte;
      acc[i] = fmaf(decode_element(format, code) * scale, static_cast<float>(x[h + i]), acc[i]);
    }
  }
  return reduce_tree(acc);
}

// Copies scales [first, first + count) of a row to the places of `lanes`, by words where all addresses allow it. Those that are
// multiplied by a weight are float32. All lanes call this.
template <typename Weight>
__device__ __noinline__ void copy_scales(const std::byte* from, int64_t first, int count, const ScaleLayout layout,
                                         std::byte* own, unsigned lanes, Weight weight) {
  const bool has_words = layout.layout != EPX_SCALES_COLUMNS && count % ScaleLayout::kPerWord == 0;
  const bool has_place = (lanes >> lane() & 1) != 0;
  const bool is_aligned = !has_place || (reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(own)) % 4 == 0;
  const bool by_words = layout.scale_bytes == 4 || (has_words && __all_sync(~0u, is_aligned ? 1 : 0) != 0);
  const int bytes = by_words ? 4 : 1; // of what is copied at a time
  const int scales = bytes > layout.scale_bytes ? ScaleLayout::kPerWord : 1;
  const int units = scales > 1 ? count / ScaleLayout::kPerWord : count;
#pragma unroll 1
  for (int unit = lane(); unit - lane() < units; unit += kWarp) { // the same in all lanes
    const bool has_unit = unit < units;
    const uint32_t stored = has_unit ? load_scale(from + unit * bytes, bytes) : 0;
    const int64_t offset = layout.place_offset(first + unit * scales);
#pragma unroll 1
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      std::byte* const to = from_lane(own, lowest_bit(left));
      uint32_t scale = stored;
      if constexpr (!std::is_same_v<Weight, NoWeight>)
        scale = formats::bits_of(times_weight_of_lane(formats::float_of(stored), weight, lowest_bit(left)));
      if (has_unit) store_scale(to + offset, bytes, scale);
    }
  }
}

// Copies the scales of a row to the places of the lanes. All lanes call this.
template <typename Weight>
__device__ inline void copy_scales_to_places(const QuantisedSource& from, const QuantisedPlaces& to, Weight weight) {
  to.for_each_layout(__ballot_sync(~0u, to.own.scales != nullptr ? 1 : 0), [&](const ScaleLayout& layout, unsigned lanes) {
    copy_scales(from.scales, 0, static_cast<int>(layout.num_scales), layout, to.own.scales, lanes, weight);
    store_scale_fill(layout, lanes, to.own.scales);
  });
  if (to.own.row_scale != nullptr) *to.own.row_scale = from.row_scale;
}

// Zeros the scales of the rows that the lanes pass; -1: none. All lanes call this.
__device__ __noinline__ inline void clear_scales(std::byte* scales, float* row_scales, const ScaleLayout layout,
                                                 int64_t row) {
  for (unsigned left = __ballot_sync(~0u, row >= 0 ? 1 : 0); left != 0; left &= left - 1) {
    const int64_t index = from_lane(row, lowest_bit(left));
    for (int64_t place = lane(); place < layout.places(); place += kWarp)
      store_scale(scales + layout.offset(index, place), layout.scale_bytes, 0);
  }
  if (row_scales != nullptr && row >= 0) row_scales[row] = 0.0f;
}

} // namespace epx::cuda
