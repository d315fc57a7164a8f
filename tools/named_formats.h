// SPDX-License-Identifier: Apache-2.0
// The row formats that ep_bench and train_moe have names for. It uses the public API only.
#pragma once

#include <array>
#include <utility>

#include "epx/epx.hpp"

namespace epx {

// Element type and scaling (epx.h, "Row formats").
enum class NamedFormat { None, Fp8Block128, Fp8Block128Pow2, Fp8Mx, Fp8E5m2Mx, Fp4Nv };

inline constexpr std::array<std::pair<const char*, NamedFormat>, 6> kNamedFormats{
    {{"none", NamedFormat::None},
     {"fp8-block128", NamedFormat::Fp8Block128},
     {"fp8-block128-pow2", NamedFormat::Fp8Block128Pow2},
     {"fp8-mx", NamedFormat::Fp8Mx},
     {"fp8-e5m2-mx", NamedFormat::Fp8E5m2Mx},
     {"fp4-nv", NamedFormat::Fp4Nv}}};

// Returns the format with the other defaults of its scaling, without tensors; an empty one for None. Throws Error.
inline RowFormat row_format(NamedFormat named) {
  switch (named) {
  case NamedFormat::None:
    break;
  case NamedFormat::Fp8Block128:
    return RowFormat(EPX_SCALING_BLOCK128);
  case NamedFormat::Fp8Block128Pow2:
    return RowFormat(EPX_SCALING_BLOCK128_POW2);
  case NamedFormat::Fp8Mx:
    return RowFormat(EPX_SCALING_MX);
  case NamedFormat::Fp8E5m2Mx: {
    RowFormat format(EPX_SCALING_MX);
    format.dtype = EPX_FLOAT8_E5M2;
    return format;
  }
  case NamedFormat::Fp4Nv:
    return RowFormat(EPX_SCALING_NV);
  }
  return {};
}

} // namespace epx
