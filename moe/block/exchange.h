// SPDX-License-Identifier: Apache-2.0
// How rows come to their experts and back: the five operations of epx.h, on the block's one layer. A path of the block is one of
// these.
#pragma once

#include <cstddef>
#include <memory>

#include "epx/epx.h"
#include "moe/block/call.h"
#include "moe/block/layout.h"
#include "moe/block/plan.h"

namespace epx::moe {

// Where a call computes, and the memory of the exchange in it: footprint() bytes of each kind.
struct ExchangeCall {
  const CallPlace& place;
  CallMemory memory;
};

class Exchange {
public:
  virtual ~Exchange() = default;

  virtual size_t handle_mem_bytes() const = 0;
  // Of its own tensors, beside handle memory.
  virtual Footprint footprint() const { return {}; }
  // Of the workspace that its calls need on a GPU, where the receive tensors have so many rows.
  virtual size_t workspace_bytes(int64_t /*num_rows*/) const { return 0; }

  // As in epx.h, collective; failures are thrown.
  virtual void prepare(const ExchangeCall& call, const epx_prepare_args& args) = 0;
  virtual void dispatch(const ExchangeCall& call, const epx_dispatch_args& args) = 0;
  virtual void combine(const ExchangeCall& call, const epx_combine_args& args) = 0;
  virtual void combine_bwd(const ExchangeCall& call, const epx_combine_bwd_args& args) = 0;
  virtual void dispatch_bwd(const ExchangeCall& call, const epx_dispatch_bwd_args& args) = 0;
};

// By the operations of a group. Local, as the next two.
std::unique_ptr<Exchange> make_group_exchange(epx_group group, const BlockPlan& plan);

// By all-gathers of all ranks' tokens and routes: each rank takes its experts' rows out of them, and sends home the partial sum of
// each token. The bits are those of a group of precision `wire`.
std::unique_ptr<Exchange> make_ring_exchange(epx_group group, const BlockPlan& plan);

// By rows that each rank sorts by expert, and ragged all-to-alls of these. The bits are those of a group of precision `exact`.
std::unique_ptr<Exchange> make_ragged_exchange(epx_group group, const BlockPlan& plan);

// All experts here, on the host.
std::unique_ptr<Exchange> make_local_exchange(const BlockPlan& plan);

} // namespace epx::moe
