// SPDX-License-Identifier: Apache-2.0
// A warp quantises and dequantises 2048 bytes of a row in its registers. Each lane has neighbouring vectors. So a block lies in one
// lane, or in few neighbouring ones, which find its amax together; each of them computes the scale.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "runtime/formats/scaling.h"
#include "runtime/stages/cuda/rows/quantised_row.cuh"
#include "runtime/stages/cuda/rows/row_vector.cuh"

namespace epx::cuda {

// Returns formats::encode_saturating() of a number that is not negative, with a fused addition: the power that Rounding::sum()
// adds is the product of the number's exponent and a constant.
template <typename Type>
__device__ inline uint32_t encode_magnitude(float magnitude) {
  using Rounding = formats::Rounding<Type>;
  constexpr float kPower = formats::float_of(((127u + Rounding::kShift) << 23) + 0x10000 - Rounding::kOffset);
  const float number = fminf(magnitude, Type::kLargest);
  const uint32_t exponent = max(formats::bits_of(number) & formats::kInfinityBits, Rounding::kLeastNormal);
  const float sum = __fmaf_rn(formats::float_of(exponent), kPower, number);
  return Rounding::code(formats::bits_of(sum)) & 0xffff;
}

// Elements T, in blocks of kBlockElements, and their codes of `Type`.
template <typename T, typename Type, int kBlockElements>
struct QuantisedStage {
  using Vector = RowVector<T>;

  static constexpr int kVectors = 4; // of a lane
  static constexpr int kBytes = kVectors * kWarp * Vector::kBytes;
  static constexpr int kElements = kBytes / static_cast<int>(sizeof(T));
  static constexpr int kBits = Type::kBits;
  static constexpr int kCodesOfVector = Vector::kElements * kBits / 8; // bytes
  static constexpr int kCodesBytes = kElements * kBits / 8;

  static constexpr int kBlock = kBlockElements;
  static constexpr int kBlocks = kElements / kBlock;
  static constexpr int kElementsOfLane = kVectors * Vector::kElements;
  static constexpr int kBlocksOfLane = kElementsOfLane > kBlock ? kElementsOfLane / kBlock : 1;
  static constexpr int kLanesOfBlock = kBlock > kElementsOfLane ? kBlock / kElementsOfLane : 1;
  static constexpr int kVectorsOfBlock = kVectors / kBlocksOfLane; // of a lane
  static constexpr int kMaxScaleBytes = kBlock == 128 ? 4 : 1;
  static constexpr bool kHasRowScale = kBlock == 16; // NV
  static_assert(kBlocksOfLane <= 2);

  // The codes of a vector.
  struct Codes {
    uint32_t words[2];
  };
  // The stored scales of a lane's blocks of a stage.
  struct Scales {
    uint32_t stored[kBlocksOfLane];
  };
  // What a lane has of a stage.
  struct Quantised {
    Codes codes[kVectors];
    Scales scales;
  };

  // ---- What a lane has: its i-th vector and its i-th block of a stage, counted from stage 0 ----

  // Lanes take their vectors, which are neighbours, in different orders: what they load or store at a time lies in different
  // banks. Of two blocks, the first that a lane takes may be the second.
  __device__ static int turn() { return (lane() / 2 + lane() / 8) % kVectors; }
  // The vector that this lane takes as its i-th of a stage.
  __device__ static int vector_of(int stage, int i) { return (stage * kWarp + lane()) * kVectors + (i ^ turn()); }
  // The block that this lane takes as its i-th of a stage.
  __device__ static int block_of(int stage, int i) {
    const int first = stage * kBlocks + lane() * kBlocksOfLane / kLanesOfBlock;
    return kBlocksOfLane == 1 ? first : first + (i ^ (turn() / kVectorsOfBlock));
  }
  // Returns whether the lane is the first of those that have its blocks.
  __device__ static bool is_first_of_block() { return lane() % kLanesOfBlock == 0; }

  // Returns the largest magnitude, or two, as amax_of_words() does, of what the lane has of its i-th block of a stage.
  __device__ static uint32_t amax_in_block(const Vector (&vectors)[kVectors], int i) {
    uint32_t amax = 0;
#pragma unroll
    for (int vector = 0; vector < kVectorsOfBlock; ++vector)
      amax = Vector::max_of(amax, vectors[i * kVectorsOfBlock + vector].amax_of_words());
    return amax;
  }
  // Returns whether what the lanes pass are magnitudes of finite elements.
  __device__ static bool all_finite(uint32_t magnitudes) {
    return __all_sync(~0u, Vector::largest_of(magnitudes) < Vector::kInfinity ? 1 : 0) != 0;
  }

  // Quantises a stage. encode_scale is e of a row of NV. `largest` becomes the largest magnitude of what it was and of the lane's
  // elements; where it is not finite, nothing else is meant. All lanes call this.
  __device__ static Quantised quantise(const WireFormat& format, float encode_scale, const Vector (&vectors)[kVectors],
                                       uint32_t& largest) {
    Quantised quantised;
    float multipliers[kBlocksOfLane];
#pragma unroll
    for (int i = 0; i < kBlocksOfLane; ++i) {
      uint32_t amax = amax_in_block(vectors, i);
      largest = Vector::max_of(largest, amax);
      amax = Vector::largest_of(amax);
#pragma unroll
      for (int distance = 1; distance < kLanesOfBlock; distance *= 2)
        amax = max(amax, __shfl_xor_sync(~0u, amax, distance));
      const formats::BlockScale<float> scale = scale_of(format, encode_scale, Vector::value_of(amax));
      multipliers[i] = scale.multiplier;
      quantised.scales.stored[i] = scale.stored;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      quantised.codes[i] = encode(vectors[i], multipliers[i / kVectorsOfBlock]);
    return quantised;
  }
  // Returns what the codes of the lane's i-th vector stand for. row_scale is that of a row of NV.
  __device__ static Vector decode(const WireFormat& format, float row_scale, const Quantised& quantised, int i) {
    float x[Vector::kElements];
    decode_codes(quantised.codes[i],
                 formats::scale_value(format.scales, quantised.scales.stored[i / kVectorsOfBlock], row_scale), x);
    Vector vector;
    vector.pack(x);
    return vector;
  }

  __device__ static void store_codes(std::byte* to, const Codes& codes) {
    if constexpr (kCodesOfVector == 8)
      *reinterpret_cast<uint2*>(to) = uint2{codes.words[0], codes.words[1]};
    else if constexpr (kCodesOfVector == 4)
      *reinterpret_cast<uint32_t*>(to) = codes.words[0];
    else
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(codes.words[0]);
  }
  __device__ static Codes load_codes(const std::byte* from) {
    if constexpr (kCodesOfVector == 8) {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      return {{words.x, words.y}};
    } else if constexpr (kCodesOfVector == 4) {
      return {{*reinterpret_cast<const uint32_t*>(from), 0}};
    } else {
      return {{*reinterpret_cast<const uint16_t*>(from), 0}};
    }
  }

private:
  // formats::scale_block() of finite elements, of which a kernel has what this scaling needs.
  __device__ static formats::BlockScale<float> scale_of(const WireFormat& format, float encode_scale, float amax) {
    if constexpr (kHasRowScale)
      return formats::scale_nv(amax, 1, encode_scale);
    else if constexpr (kBlock == 32)
      return formats::scale_mx<Type>(amax);
    else if (format.scaling == EPX_SCALING_BLOCK128)
      return formats::scale_block128(amax, format.amax_floor);
    else
      return formats::scale_block128_pow2(amax, format.amax_floor, format.scales == EPX_FLOAT8_E8M0);
  }
  __device__ static Codes encode(const Vector& vector, float multiplier) {
    float x[Vector::kElements];
    vector.unpack(x);
    Codes codes{};
    if constexpr (Type::kBits == 8) {
#pragma unroll
      for (int i = 0; i < Vector::kElements; i += 4)
        codes.words[i / 4] = encode_four<Type>(x + i, multiplier, true);
    } else if (multiplier != 0.0f) {
      uint32_t magnitudes = 0;
#pragma unroll
      for (int i = 0; i < Vector::kElements; ++i)
        magnitudes |= encode_magnitude<Type>(fabsf(x[i] * multiplier)) << (Type::kBits * i);
      codes.words[0] = magnitudes | vector.nibble_signs();
    }
    return codes;
  }
  __device__ static void decode_codes(const Codes& codes, float scale, float (&x)[Vector::kElements]) {
    if constexpr (Type::kBits == 8) {
#pragma unroll
      for (int i = 0; i < Vector::kElements; i += 2) {
        const float2 two = decode_two<Type>(codes.words[i / 4] >> (8 * (i % 4)) & 0xffff);
        x[i] = two.x * scale;
        x[i + 1] = two.y * scale;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Vector::kElements; ++i)
        x[i] = formats::decode<Type>(codes.words[0] >> (4 * i)) * scale;
    }
  }
};

// Calls take(std::type_identity<Stage>()) with the QuantisedStage of the format.
template <typename T, typename Take>
__device__ __forceinline__ void with_quantised_stage(const WireFormat& format, const Take& take) {
  if (format.scaling == EPX_SCALING_NV)
    take(std::type_identity<QuantisedStage<T, formats::E2M1, 16>>());
  else if (format.scaling != EPX_SCALING_MX)
    take(std::type_identity<QuantisedStage<T, formats::E4M3, 128>>());
  else if (format.elements == EPX_FLOAT8_E5M2)
    take(std::type_identity<QuantisedStage<T, formats::E5M2, 32>>());
  else
    take(std::type_identity<QuantisedStage<T, formats::E4M3, 32>>());
}

} // namespace epx::cuda
