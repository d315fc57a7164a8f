// SPDX-License-Identifier: Apache-2.0
// The memory of blocks: flights, and what a call needs while it runs, which all flights share.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "epx/epx_moe.h"
#include "moe/block/layout.h"
#include "moe/block/memory.h"
#include "moe/block/path.h"

namespace epx::moe {

// The bytes of an arena. Throws when an int64 cannot count them.
struct ArenaBytes {
  int64_t window, local;
};
ArenaBytes arena_bytes(const Footprint& footprint, int32_t num_flights);

class Arena {
public:
  // Collective over the group, which may be NULL. A block on this path fits, with receive tensors of num_rows rows. That number
  // is the same on all ranks, and so is num_flights.
  Arena(epx_group group, const BlockPath& path, int64_t num_rows, int32_t num_flights);

  // Gives back what the group lends. Collective; before the destructor.
  void release();

  // Throws unless a block of this group on this path fits. Returns the rows that its tensors have here.
  int64_t require_fit(epx_group group, const BlockPath& path) const;

  epx_group group() const { return group_; } // or NULL
  int32_t num_flights() const { return static_cast<int32_t>(flights_.size()); }
  epx_moe_arena_info info() const;
  int device() const { return device_; }
  int64_t add_block() { return ++num_blocks_; } // returns the number of a new block

  // Which forward has filled a flight.
  struct Filled {
    int64_t block = 0;       // its number, from 1
    int64_t num_tokens = -1; // -1: none that succeeded
    epx_dtype logits_dtype = EPX_DTYPE_UNSET;
  };
  Filled& filled(int32_t flight) { return flights_[static_cast<size_t>(flight)]; }

  CallMemory memory(int32_t flight) const;

  // Runs enqueue(is_captured), which launches what a call consists of, after the arena's calls before, whatever stream these
  // were made on. On a GPU it throws, and runs nothing, when a capture keeps the call from being launched.
  template <typename Enqueue>
  void run_in_order(std::string_view call, epx_stream stream, const Enqueue& enqueue) {
    if (begin_call(call, stream)) return enqueue(true);
    try {
      enqueue(false);
    } catch (...) {
      try { // some of the call may have been launched
        end_call(stream);
      } catch (...) { // the first failure says more
      }
      throw;
    }
    end_call(stream);
  }

private:
  bool begin_call(std::string_view call, epx_stream stream); // returns whether the call is captured
  void end_call(epx_stream stream);
  std::byte* window() const { return group_ != nullptr ? group_window_ : host_window_.get(); }
  std::byte* local() const { return device_memory_ != nullptr ? device_memory_.get() : host_memory_.get(); }
  void allocate_local(int64_t bytes, int32_t num_flights);

  epx_group group_; // or NULL
  Footprint footprint_;
  int64_t num_rows_;
  std::vector<Filled> flights_;
  int device_ = -1;
  int64_t num_blocks_ = 0;
  std::byte* group_window_ = nullptr; // with a group, which owns it until release()
  HostMemory host_window_;            // without
  HostMemory host_memory_;
  cuda::DeviceMemory device_memory_{nullptr};
  cuda::OwnedStreamOrder order_; // on a GPU
};

} // namespace epx::moe
