// SPDX-License-Identifier: Apache-2.0
// The GroupContext holds a group's constants. Group::create makes it at once when all of them are known; the node of a group of
// several has one of its own.
#pragma once

#include <cstdint>

#include "epx/epx.h"
#include "runtime/config.h"
#include "runtime/layout/window_layout.h"
#include "transport/peer_window.h"

namespace epx {

struct GroupContext {
  epx_transport transport; // in use, never AUTO; the group chooses its backend by it, and nothing else depends on it
  GroupShape shape;
  WindowLayout layout;
  uint64_t group_id;
  int rank;
  epx_overflow overflow;
  int64_t timeout_ms;
  bool checks_handle_mem; // EPX_CHECK_HANDLE_MEM: all of it, by its checksum
  bool has_ordered_calls; // by the one who makes them, on whatever streams: legs of a group of several nodes
  // A kernel behind gather reads the rows that gather has staged: in legs of a group of several nodes, but for
  // EPX_COMBINE_NODE.
  bool forwards_staged_rows;
  WindowAccess window_access;
};

} // namespace epx
