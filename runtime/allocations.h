// SPDX-License-Identifier: Apache-2.0
// The windows that the user made with epx_mem_alloc or epx_mem_register. Their numbers are the same on all ranks, since
// allocation is collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "base/error.h"
#include "runtime/layout/window_layout.h"
#include "transport/transport.h"

namespace epx {

class Allocations {
public:
  // Takes ownership of a window and returns where this rank's own memory in it starts.
  std::byte* add(std::unique_ptr<Window> window) {
    std::byte* start = window->view().local<std::byte>(0);
    windows_.emplace(next_++, std::move(window));
    return start;
  }

  // Returns where [data, data + bytes) lies; kNotRegistered when no allocation contains it. None contains an empty range.
  AllocationPlace locate(const std::byte* data, int64_t bytes) const {
    if (data == nullptr || bytes == 0) return kNotRegistered;
    for (const auto& [number, window] : windows_) {
      const std::byte* start = window->view().local<std::byte>(0);
      if (data >= start && data < start + window->bytes() && bytes <= window->bytes() - (data - start))
        return {number, data - start};
    }
    return kNotRegistered;
  }

  // Returns the number of the allocation that starts at `data`. Throws INVALID_ARGUMENT when none does.
  int64_t require_start(const void* data) const {
    const AllocationPlace place = locate(static_cast<const std::byte*>(data), 1);
    if (!place.is_registered() || place.offset != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "epx_mem_free: {} is not the start of memory from epx_mem_alloc or epx_mem_register of this "
           "group",
           data);
    return place.allocation;
  }

  // Returns whether `bytes` bytes from `place` on lie in an allocation.
  bool contains(const AllocationPlace& place, int64_t bytes) const {
    const auto found = windows_.find(place.allocation);
    return found != windows_.end() && place.offset >= 0 && place.offset <= found->second->bytes() &&
           bytes <= found->second->bytes() - place.offset;
  }

  std::byte* peer_address(int peer, const AllocationPlace& place) const {
    return windows_.at(place.allocation)->view().at<std::byte>(peer, place.offset);
  }

  int64_t next_number() const { return next_; } // the number that the next window gets
  bool contains(int64_t allocation) const { return windows_.contains(allocation); }
  void remove(int64_t allocation) { windows_.erase(allocation); }

private:
  std::map<int64_t, std::unique_ptr<Window>> windows_;
  int64_t next_ = 0;
};

} // namespace epx
