// SPDX-License-Identifier: Apache-2.0
// Elements of tensors as floats.
#pragma once

#include <cstdint>

#include "runtime/formats/elements.h"

namespace epx::moe {

struct Bfloat16Bits {
  uint16_t bits;
  float value() const { return formats::float_of(static_cast<uint32_t>(bits) << 16); }
};
struct Float16Bits {
  uint16_t bits;
  float value() const {
    const uint32_t magnitude = bits & 0x7fffU;
    const uint32_t shifted = magnitude << 13; // as a float32 2^112 times too small, where it is finite
    const uint32_t wide =
        magnitude < 0x7c00 ? formats::bits_of(formats::float_of(shifted) * 0x1p112F) : shifted | formats::kInfinityBits;
    return formats::float_of(wide | (bits & 0x8000U) << 16);
  }
};
struct Float32Bits {
  float bits;
  float value() const { return bits; }
};

} // namespace epx::moe
