// SPDX-License-Identifier: Apache-2.0
// Groups by number. A compiled program of XLA outlives the Python objects that it was traced with, so it refers to a group by a
// number that is never used again, and a group is destroyed only when no handler is in one of its calls.
#pragma once

#include <cstdint>

#include <epx/epx.h>

namespace epx_ffi {

// Uses the group with this number for as long as the object lives.
class GroupUse {
public:
  explicit GroupUse(int64_t id);
  ~GroupUse();
  GroupUse(const GroupUse&) = delete;
  GroupUse& operator=(const GroupUse&) = delete;

  epx_group get() const { return group_; }        // NULL when there is no such group any more
  bool is_on_host() const { return is_on_host_; } // whether its transport is `host`

private:
  int64_t id_;
  epx_group group_;
  bool is_on_host_;
};

} // namespace epx_ffi

extern "C" {

/** Registers a group. Returns its number, from 1: the same on ranks that register the same groups in the same order; or 0, when
 * epx_group_query refuses the group (epx_last_error). */
EPX_API int64_t epx_ffi_register(epx_group group);

/** From now on calls with this number are refused. Returns 1 when no call is under way, so that the group may be destroyed, else
 * 0: ask again then. Does not wait. */
EPX_API int32_t epx_ffi_retire(int64_t id);
}
