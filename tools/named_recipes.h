// SPDX-License-Identifier: Apache-2.0
// The names that ep_bench and train_moe have for recipes of experts (epx_moe.h, "Grouped FFN in FP8").
#pragma once

#include <array>
#include <utility>

#include "epx/epx_moe.h"

namespace epx {

inline constexpr std::array<std::pair<const char*, epx_moe_recipe>, 3> kNamedRecipes{
    {{"wide", EPX_MOE_RECIPE_WIDE}, {"fp8_activations", EPX_MOE_RECIPE_FP8_ACTIVATIONS}, {"fp8", EPX_MOE_RECIPE_FP8}}};

} // namespace epx
