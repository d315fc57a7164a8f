// SPDX-License-Identifier: Apache-2.0
// A row format says what travels for a row of scatter. A format F has
//   F(call)                   of one call; it may own memory
//   F::kIsReceiveFormat       whether the row travels as the receive tensor has it, so that a sender may store it there
//   encode(wire, row) const   writes what travels for a row [H], at most WindowLayout::row_stride bytes
//   decode(wire)              returns the row [H] in the receive format, which is valid until the next decode
// It has no virtual function, since it is called for each row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtypes.h"
#include "runtime/stages/stages.h"

namespace epx::host {

// The row itself.
class PlainRows {
public:
  explicit PlainRows(const MovementCall& call) : bytes_(static_cast<size_t>(epx::row_bytes(call.dtype, call.hidden))) {}

  static constexpr bool kIsReceiveFormat = true;
  void encode(std::byte* wire, const std::byte* row) const { std::memcpy(wire, row, bytes_); }
  const std::byte* decode(const std::byte* wire) const { return wire; }

private:
  size_t bytes_;
};

// Of dispatch, prepare_dispatch and dispatch_rank_major. Sidecars, and the gradients of combine_bwd, travel as they are.
using WireRows = PlainRows;

} // namespace epx::host
