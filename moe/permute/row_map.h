// SPDX-License-Identifier: Apache-2.0
// Which row each route has, for host and device.
#pragma once

#include <cstdint>

namespace epx::moe {

// [T, K]: the row of each route, -1 for none. On a GPU nobody has looked at the entries: they may be anything.
struct RowMap {
  const int32_t* rows = nullptr;
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  int64_t num_rows = 0; // N
};

} // namespace epx::moe
