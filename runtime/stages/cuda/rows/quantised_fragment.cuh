// SPDX-License-Identifier: Apache-2.0
// The codes of a lane's fragments of an h-tile (row_reader.cuh): how sums in registers are quantised, and added to others. A
// block has the elements of at least four neighbouring lanes; those of NV are shorter, and no sum travels in them.
//
// Lanes share the work on scales. Neighbouring lanes, as many as there are fragments, own one fragment each: a lane finds the
// scale of the block in which it has elements of that fragment, and hands it to the others.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/device/fragment.cuh"
#include "base/device/warp.cuh"
#include "runtime/formats/row_format.h"
#include "runtime/formats/scaling.h"
#include "runtime/stages/cuda/rows/quantised_row.cuh"

namespace epx::cuda {

template <int kFragments>
struct QuantisedFragments {
  static constexpr int kOwners = static_cast<int>(std::bit_ceil(static_cast<unsigned>(kFragments)));
  static_assert(kOwners <= 4);

  uint32_t codes[kFragments][kFragment / 4];
  uint32_t stored; // the scale of a block of own_fragment()

  // Where there are three fragments, the last owner has none.
  __device__ static int own_fragment() { return lane() % kOwners; }
  // Returns the value of the lane that owns a fragment.
  template <typename Value>
  __device__ static Value from_owner(Value value, int fragment) {
    return from_lane(value, (lane() & ~(kOwners - 1)) | fragment);
  }
};

// Lanes pass kOwners values, one of a block each; lane l gets the largest of its value l % kOwners in its block. lanes_of_block:
// kOwners or more.
template <int kOwners>
__device__ inline uint32_t max_of_block(uint32_t (&values)[kOwners], int lanes_of_block) {
#pragma unroll
  for (int distance = 1; distance < kOwners; distance *= 2) {
    const bool is_odd = (lane() & distance) != 0;
#pragma unroll
    for (int i = 0; i < kOwners / 2 / distance; ++i) {
      const uint32_t kept = is_odd ? values[2 * i + 1] : values[2 * i];
      const uint32_t given = is_odd ? values[2 * i] : values[2 * i + 1];
      values[i] = max(kept, __shfl_xor_sync(~0u, given, distance));
    }
  }
  uint32_t most = values[0];
  for (int distance = kOwners; distance < lanes_of_block; distance *= 2)
    most = max(most, __shfl_xor_sync(~0u, most, distance));
  return most;
}

// Returns the largest magnitude_of(x) of the block of the fragment that the lane owns.
template <int kFragments, typename MagnitudeOf>
__device__ inline uint32_t amax_of_block(const float (&x)[kFragments][kFragment], int lanes_of_block,
                                         const MagnitudeOf& magnitude_of) {
  uint32_t amax[QuantisedFragments<kFragments>::kOwners] = {};
#pragma unroll
  for (int i = 0; i < kFragments; ++i)
#pragma unroll
    for (float value : x[i])
      amax[i] = max(amax[i], magnitude_of(value));
  return max_of_block(amax, lanes_of_block);
}

template <typename Type, bool kIsFinite, int kFragments>
__device__ inline void encode_fragments(const float (&x)[kFragments][kFragment], float own_multiplier,
                                        QuantisedFragments<kFragments>& to) {
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const float multiplier = to.from_owner(own_multiplier, i);
#pragma unroll
    for (int word = 0; word < kFragment / 4; ++word)
      to.codes[i][word] = encode_four<Type>(x[i] + 4 * word, multiplier, kIsFinite);
  }
}

// Elements beyond the end of a row are 0. All lanes call this.
template <int kFragments>
__device__ inline QuantisedFragments<kFragments> quantise_fragments(const WireFormat& format,
                                                                    const float (&x)[kFragments][kFragment]) {
  const int lanes_of_block = format.block() / kFragment;
  uint32_t amax =
      amax_of_block(x, lanes_of_block, [](float value) { return formats::bits_of(value) & formats::kMagnitudeBits; });
  const bool is_finite = __all_sync(~0u, amax < formats::kInfinityBits ? 1 : 0) != 0;
  if (!is_finite) amax = amax_of_block(x, lanes_of_block, [](float value) { return magnitude_if_finite(value); });
  const formats::BlockScale scale = formats::scale_block(format, formats::float_of(amax), is_finite, 1.0f);
  QuantisedFragments<kFragments> quantised;
  quantised.stored = scale.stored;
  const auto encode = [&](auto all_finite) { // code of its own for what is rare
    if (format.elements == EPX_FLOAT8_E5M2)
      encode_fragments<formats::E5M2, all_finite>(x, scale.multiplier, quantised);
    else
      encode_fragments<formats::E4M3, all_finite>(x, scale.multiplier, quantised);
  };
  if (is_finite)
    encode(std::true_type());
  else
    encode(std::false_type());
  return quantised;
}

template <typename Type, int kFragments>
__device__ inline void add_decoded(const QuantisedFragments<kFragments>& quantised, float own_scale,
                                   float (&acc)[kFragments][kFragment]) {
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const float scale = quantised.from_owner(own_scale, i);
#pragma unroll
    for (int element = 0; element < kFragment; element += 2) {
      const float2 two = decode_two<Type>(quantised.codes[i][element / 4] >> (8 * (element % 4)) & 0xffff);
      acc[i][element] = __fadd_rn(acc[i][element], __fmul_rn(two.x, scale));
      acc[i][element + 1] = __fadd_rn(acc[i][element + 1], __fmul_rn(two.y, scale));
    }
  }
}

// acc += what the codes stand for. All lanes call this.
template <int kFragments>
__device__ inline void add_quantised(const WireFormat& format, const QuantisedFragments<kFragments>& quantised,
                                     float (&acc)[kFragments][kFragment]) {
  const float scale = formats::scale_value(format.scales, quantised.stored, 0.0f);
  if (format.elements == EPX_FLOAT8_E5M2)
    add_decoded<formats::E5M2>(quantised, scale, acc);
  else
    add_decoded<formats::E4M3>(quantised, scale, acc);
}

// Elements [first, first + size) of rows of `hidden` elements in staging (WireRow). `first` is a multiple of a block. Positions
// h are counted from it, and are those of a lane's first fragment in an h-tile. Codes are moved by vectors, whatever the size is:
// a row has room behind its last element.
class WirePart {
public:
  __device__ WirePart(const WireFormat& format, int64_t hidden, int64_t first, int64_t size)
      : format_(format), codes_(static_cast<uint32_t>(first)), size_(static_cast<uint32_t>(size)),
        scale_bytes_(static_cast<uint32_t>(single_element_bytes(format.scales))),
        block_shift_(static_cast<uint32_t>(format.block_shift())),
        scales_(static_cast<uint32_t>(WireRow(format, hidden).scales) + (codes_ >> block_shift_) * scale_bytes_) {}

  __device__ const WireFormat& format() const { return format_; }
  __device__ uint32_t size() const { return size_; }
  // Returns how many elements the part has from h on; below 0: h is beyond its end.
  __device__ int left(uint32_t h) const { return static_cast<int>(size_ - h); }

  template <int kFragments>
  __device__ QuantisedFragments<kFragments> load(const std::byte* row, uint32_t h) const {
    using Quantised = QuantisedFragments<kFragments>;
    Quantised quantised{};
    const std::byte* const from = row + (codes_ + h);
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      if (i * kWarpTile < left(h)) {
        const uint2 codes = *reinterpret_cast<const uint2*>(from + i * kWarpTile);
        quantised.codes[i][0] = codes.x;
        quantised.codes[i][1] = codes.y;
      }
    // The lane's own elements of the block may lie beyond the end.
    const uint32_t block = (h + static_cast<uint32_t>(Quantised::own_fragment() * kWarpTile)) >> block_shift_;
    if (Quantised::own_fragment() < kFragments && left(block << block_shift_) > 0)
      quantised.stored = load_scale(row + scale_offset(block), static_cast<int>(scale_bytes_));
    return quantised;
  }
  template <int kFragments>
  __device__ void store(std::byte* row, uint32_t h, const QuantisedFragments<kFragments>& quantised) const {
    std::byte* const to = row + (codes_ + h);
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      if (i * kWarpTile < left(h))
        *reinterpret_cast<uint2*>(to + i * kWarpTile) = uint2{quantised.codes[i][0], quantised.codes[i][1]};
    // The first lanes of a block store the scales of its fragments.
    const int lane_of_block = lane() & ((1 << block_shift_) / kFragment - 1);
    const int at = lane_of_block * (kWarpTile - kFragment);
    if (lane_of_block < kFragments && at < left(h))
      store_scale(row + scale_offset((h + static_cast<uint32_t>(at)) >> block_shift_), static_cast<int>(scale_bytes_),
                  quantised.stored);
  }
  // Overwrites the part, as tests do.
  __device__ void scribble(std::byte* row) const {
    scribble_row(row + codes_, size_);
    scribble_row(row + scales_, format_.scale_bytes(size_));
  }

private:
  __device__ uint32_t scale_offset(uint32_t block) const {
    return scales_ + block * scale_bytes_;
  }

  const WireFormat& format_;
  uint32_t codes_; // offset in bytes, as scales_
  uint32_t size_;
  uint32_t scale_bytes_, block_shift_;
  uint32_t scales_;
};

} // namespace epx::cuda
