// SPDX-License-Identifier: Apache-2.0
// The names that ep_bench and train_moe have for paths of the block (epx_moe_path).
#pragma once

#include <array>
#include <utility>

#include "epx/epx_moe.h"

namespace epx {

inline constexpr std::array<std::pair<const char*, epx_moe_path>, 3> kNamedPaths{
    {{"dispatch", EPX_MOE_PATH_DISPATCH}, {"ring", EPX_MOE_PATH_RING}, {"ragged", EPX_MOE_PATH_RAGGED}}};

} // namespace epx
