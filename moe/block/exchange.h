// SPDX-License-Identifier: Apache-2.0
// What a block needs of a group: the five operations of epx.h, on the block's one layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "epx/epx.hpp"
#include "epx/epx_moe.h"
#include "moe/tensors.h"

namespace epx::moe {

class Exchange {
public:
  virtual ~Exchange() = default;

  struct Shape {
    Place place = Place::host; // of tensors
    int num_ranks = 1;
    int num_local_experts = 0;
    int64_t max_tokens = 0;   // T, per rank
    int64_t row_capacity = 0; // R
    size_t handle_mem_bytes = 0;
  };
  const Shape& shape() const { return shape_; }

  // As in epx.h, collective; failures are thrown.
  virtual void prepare(const PrepareArgs& args) = 0;
  virtual void dispatch(const DispatchArgs& args) = 0;
  virtual void combine(const CombineArgs& args) = 0;
  virtual void combine_bwd(const CombineBwdArgs& args) = 0;
  virtual void dispatch_bwd(const DispatchBwdArgs& args) = 0;

protected:
  Shape shape_;
};

// Over a group. Local. Throws, with the names and values, when the block does not fit the group. The config has been checked.
std::unique_ptr<Exchange> make_group_exchange(GroupView group, const epx_moe_block_config& config);

// All experts here, on the host; T = float or double.
template <typename T>
std::unique_ptr<Exchange> make_local_exchange(const epx_moe_block_config& config);

// Runs `call`, which calls a group. A failure of the group is thrown as Error, of the C++ API; inside this library it is a
// StatusError with the same status and sentence.
template <typename Call>
decltype(auto) with_group(Call&& call) {
  try {
    return call();
  } catch (const Error& error) {
    throw StatusError(error.status(), error.what());
  }
}

} // namespace epx::moe
