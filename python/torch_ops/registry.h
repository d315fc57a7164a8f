// SPDX-License-Identifier: Apache-2.0
// Groups and blocks by number. Operators take numbers, since a compiled graph may outlive the Python objects that it was traced
// with; a number is never used again, and one that has been retired is refused.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <epx/epx.h>
#include <epx/epx_moe.h>

namespace epx_torch {

// Where the tensors of a group lie.
struct Place {
  bool is_cuda = false;
  int32_t device_index = -1; // of the GPU; -1 on the host transport
};

struct Group {
  epx_group group = nullptr;
  epx_group_info info = {};
  Place place;
  std::atomic<bool> is_retired = false;
  std::atomic<int> num_calls = 0; // that are under way on the host
};

// The flights of an arena. A flight is busy while the tensor that names it lives, which autograd saves for the backward.
class Flights {
public:
  explicit Flights(int32_t count) : flights_(static_cast<size_t>(count)) {}

  struct Ticket {
    int64_t index, generation;
  };
  // The first flight that is not busy. Ranks that make the same calls get the same one. Refuses when there is none.
  Ticket take();
  void release(const Ticket& ticket);
  // Refuses a ticket whose flight has been released, which another forward may have taken since.
  void verify(const Ticket& ticket);

private:
  struct Flight {
    int64_t generation = 0;
    bool is_busy = false;
  };
  std::mutex mutex_;
  std::vector<Flight> flights_;
};

struct Block {
  std::shared_ptr<Group> group;
  epx_moe_block block = nullptr;
  epx_moe_router_config router = {};
  int32_t hidden_dim = 0;
  epx_dtype dtype = EPX_FLOAT32;
  bool has_gate = false;
  std::shared_ptr<Flights> flights;
  std::atomic<bool> is_retired = false;
  std::atomic<int> num_in_flight = 0; // tensors that name a flight of this block's
};

// The group with this number for as long as the object lives. Refuses when there is none.
class GroupUse {
public:
  explicit GroupUse(int64_t id);
  explicit GroupUse(std::shared_ptr<Group> group);
  ~GroupUse() { group_->num_calls.fetch_sub(1); }
  GroupUse(const GroupUse&) = delete;
  GroupUse& operator=(const GroupUse&) = delete;
  const Group* operator->() const { return group_.get(); }
  const Group& operator*() const { return *group_; }

private:
  void enter();
  std::shared_ptr<Group> group_;
};

// The block with this number. Refuses when there is none.
std::shared_ptr<Block> find_block(int64_t id);

} // namespace epx_torch

extern "C" {

/** Registers a group whose tensors lie on this GPU, or on the host (-1). Returns its number, from 1, or 0 when the group cannot
 * be queried. */
EPX_API int64_t epx_torch_register_group(epx_group group, int32_t device_index);

/** From now on calls with this number are refused. Returns 1 when no call is under way, so that the group may be destroyed;
 * else 0. Does not wait. */
EPX_API int32_t epx_torch_retire_group(int64_t id);

/** Registers the flights of an arena. Returns their number, from 1, or 0 where there is no memory for them. */
EPX_API int64_t epx_torch_register_flights(int32_t count);

/** Registers a block of a registered group and of registered flights. Returns its number, from 1, or 0 where there is no memory
 * for it. */
EPX_API int64_t epx_torch_register_block(int64_t group_id, int64_t flights_id, epx_moe_block block,
                                         const epx_moe_router_config* router, int32_t hidden_dim, int32_t dtype,
                                         int32_t has_gate);

/** Flights are registered for the blocks that use them; from now on no other block can. */
EPX_API void epx_torch_retire_flights(int64_t id);

/** Whether no backward of the block is still to come: 1 or 0. */
EPX_API int32_t epx_torch_block_is_idle(int64_t id);

/** From now on calls with this number are refused. */
EPX_API void epx_torch_retire_block(int64_t id);
}
