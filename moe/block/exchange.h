// SPDX-License-Identifier: Apache-2.0
// What a block needs of a group: the five operations of epx.h, on the block's one layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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
  virtual void prepare(const epx_prepare_args& args) = 0;
  virtual void dispatch(const epx_dispatch_args& args) = 0;
  virtual void combine(const epx_combine_args& args) = 0;
  virtual void combine_bwd(const epx_combine_bwd_args& args) = 0;
  virtual void dispatch_bwd(const epx_dispatch_bwd_args& args) = 0;

protected:
  Shape shape_;
};

// Over a group. Local. Throws, with the names and values, when the block does not fit the group. The config has been checked.
std::unique_ptr<Exchange> make_group_exchange(epx_group group, const epx_moe_block_config& config);

// All experts here, on the host; T = float or double.
template <typename T>
std::unique_ptr<Exchange> make_local_exchange(const epx_moe_block_config& config);

} // namespace epx::moe
