// SPDX-License-Identifier: Apache-2.0
// The numbers of a block's tensors are a function of (seed, tensor, part, index) in 32-bit integers alone, so that programs in
// other languages compute on the same ones; examples/native/moe_data.py has the same functions.
#pragma once

#include <bit>
#include <cstdint>

namespace epx::bench {

enum class BlockTensor : uint32_t {
  Tokens = 1,
  Logits,
  GradOut,
  GateUp,
  Down,
  GateUpBias,
  DownBias,
  Popularity,
  Sample,
  GatheredGateUp, // of weights that are only gathered (weight_gather.h); a part is a row
  GatheredDown,
  GatheredGateUpScales,
  GatheredDownScales
};

// A bijection of 32-bit words ("lowbias32" of Chris Wellons' hash prospector).
constexpr uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// BlockStream is the random words of one part of a tensor: a rank's rows of what is per token, or one expert's parameters. The
// key enters twice, so that no stream is a shifted copy of another.
struct BlockStream {
  uint32_t first = 0, second = 0;

  constexpr BlockStream(uint64_t seed, BlockTensor tensor, uint32_t part) {
    uint32_t key = mix32(static_cast<uint32_t>(seed) + 0x9e3779b9u);
    key = mix32(key ^ static_cast<uint32_t>(seed >> 32));
    key = mix32(key + static_cast<uint32_t>(tensor));
    first = mix32(key + part);
    second = mix32(first + 0x68bc21ebu);
  }

  constexpr uint32_t at(uint32_t index) const { return mix32(mix32(index + first) ^ second); }

  // Returns one of 2^24 numbers that are spaced evenly in [-1, 1). A power of two times it is exact in float32.
  constexpr float symmetric(uint32_t index) const {
    return static_cast<float>(static_cast<int32_t>(at(index) >> 8) - (1 << 23)) * 0x1p-23f;
  }
};

// Rounds a finite number to the nearest bfloat16, ties to even.
constexpr uint16_t bf16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

} // namespace epx::bench
