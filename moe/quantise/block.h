// SPDX-License-Identifier: Apache-2.0
// The block of the quantisers.
#pragma once

namespace epx::moe {

inline constexpr int kQuantiseBlock = 128; // elements that have a scale in common, along a row or a column

} // namespace epx::moe
