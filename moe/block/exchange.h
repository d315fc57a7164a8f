// SPDX-License-Identifier: Apache-2.0
// What a block needs of a group: the five operations of epx.h, on the block's one layer, and memory that they reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "epx/epx.hpp"
#include "epx/epx_moe.h"

namespace epx::moe {

class Exchange {
public:
  virtual ~Exchange() = default;

  struct Shape {
    int num_ranks = 1;
    int num_local_experts = 0;
    int64_t max_tokens = 0;   // T, per rank
    int64_t row_capacity = 0; // R
    size_t handle_mem_bytes = 0;
  };
  const Shape& shape() const { return shape_; }

  // Zeroed, aligned to 256 bytes. Collective; once.
  virtual std::byte* allocate(size_t bytes) = 0;
  // Gives that memory back. Collective.
  virtual void release() = 0;

  // As in epx.h, collective; failures are thrown.
  virtual void prepare(const PrepareArgs& args) = 0;
  virtual void dispatch(const DispatchArgs& args) = 0;
  virtual void combine(const CombineArgs& args) = 0;
  virtual void combine_bwd(const CombineBwdArgs& args) = 0;
  virtual void dispatch_bwd(const DispatchBwdArgs& args) = 0;

protected:
  Shape shape_;
};

// Over a group. Local. Throws, with the names and values, when the block does not fit the group.
std::unique_ptr<Exchange> make_group_exchange(GroupView group, const epx_moe_block_config& config);

// All experts here; T = float or double.
template <typename T>
std::unique_ptr<Exchange> make_local_exchange(const epx_moe_block_config& config);

} // namespace epx::moe
