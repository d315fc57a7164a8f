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
struct Float32Bits {
  float bits;
  float value() const { return bits; }
};

} // namespace epx::moe
