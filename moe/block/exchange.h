// SPDX-License-Identifier: Apache-2.0
// What the dispatch path needs of a group: the five operations of epx.h, on the block's one layer.
#pragma once

#include <cstddef>
#include <memory>

#include "epx/epx.h"
#include "moe/block/plan.h"

namespace epx::moe {

class Exchange {
public:
  virtual ~Exchange() = default;

  virtual size_t handle_mem_bytes() const = 0;

  // As in epx.h, collective; failures are thrown.
  virtual void prepare(const epx_prepare_args& args) = 0;
  virtual void dispatch(const epx_dispatch_args& args) = 0;
  virtual void combine(const epx_combine_args& args) = 0;
  virtual void combine_bwd(const epx_combine_bwd_args& args) = 0;
  virtual void dispatch_bwd(const epx_dispatch_bwd_args& args) = 0;
};

// Over a group. Local.
std::unique_ptr<Exchange> make_group_exchange(epx_group group, const BlockPlan& plan);

// All experts here, on the host.
std::unique_ptr<Exchange> make_local_exchange(const BlockPlan& plan);

} // namespace epx::moe
