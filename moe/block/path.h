// SPDX-License-Identifier: Apache-2.0
// How tokens come to their experts, through them and back: what a block does between its router and its output. What is the
// same on every path is Block's part: the agreement of the ranks, the router, the order of calls in the arena, and the end of
// the group where a rank fails alone.
//
// A path keeps nothing of a call in itself: what the backward needs lies in the memory of the flight.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "epx/epx_moe.h"
#include "moe/block/call.h"
#include "moe/block/layout.h"
#include "moe/block/plan.h"

namespace epx::moe {

// A forward or a backward, as far as the block has come with it.
struct PathCall {
  const CallPlace& place;
  const RoutingTensors& routing;
  CallMemory memory;      // for the path's tensors: footprint() bytes of each kind
  int64_t num_rows;       // N
  bool& has_called_group; // the path sets it after its first call of the group: from then on peers may wait for this rank
};

// Runs `enqueue` once, in the order of the arena's calls, and the router with it: before a forward's, behind a backward's.
using RunInOrder = std::function<void(const std::function<void()>& enqueue)>;

class BlockPath {
public:
  explicit BlockPath(const BlockPlan& plan) : plan_(plan) {}
  BlockPath(const BlockPath&) = delete;
  BlockPath& operator=(const BlockPath&) = delete;
  virtual ~BlockPath() = default;

  // What it has of the group and of the block's config.
  const BlockPlan& plan() const { return plan_; }

  // The bytes of the path's tensors where the experts' side has num_rows rows (N), at most the plan's row_capacity. Throws
  // when an int64 cannot count them.
  virtual Footprint footprint(int64_t num_rows) const = 0;
  // The workspace that its calls need on a GPU, beside these tensors; 0 on the host.
  virtual int64_t workspace_bytes(int64_t num_rows) const = 0;

  // Collective where there is a group. A call first checks the experts' parameters and their gradients, which the block has
  // left to it, and throws. It then passes to `run` what it enqueues. The forward reads topk_idx and topk_weights of
  // `routing`, and writes its global_counts and args.out. The backward reads what its forward left in the flight, and writes
  // grad_topk_weights of `routing`, args.grad_tokens and args.grads.
  virtual void forward(const PathCall& call, const epx_moe_block_fwd_args& args, const RunInOrder& run) = 0;
  virtual void backward(const PathCall& call, const epx_moe_block_bwd_args& args, const RunInOrder& run) = 0;

private:
  BlockPlan plan_;
};

// All that a block on this path has in the arena, the block's own tensors included; and the bytes of the workspace in it, which
// its router uses too.
Footprint footprint_of(const BlockPath& path, int64_t num_rows);
int64_t workspace_of(const BlockPath& path, int64_t num_rows);

// The path that the config names. As plan_block: local, and throws.
std::unique_ptr<BlockPath> make_path(epx_group group, const epx_moe_block_config& config);

} // namespace epx::moe
