// SPDX-License-Identifier: Apache-2.0
// The zones that epx_prepare makes are those of R rows. Where the receive tensors have fewer, epx drops the routes of the slots
// beyond, and the FFN must not look for their rows.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "moe/integers.h"

namespace epx::moe {

// Bounds the zone of expert e, or with e = num_experts the last offset, to num_rows rows, in place.
EPX_HOST_DEVICE inline void clamp_zone(const Integers& counts, const Integers& offsets, int e, int num_experts,
                                       int64_t num_rows) {
  const int64_t first = offsets[e] < num_rows ? offsets[e] : num_rows;
  if (e < num_experts && counts[e] > num_rows - first) counts.set(e, num_rows - first);
  offsets.set(e, first);
}

} // namespace epx::moe
