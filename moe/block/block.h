// SPDX-License-Identifier: Apache-2.0
// One MoE layer: the router, and a path to the experts and back. It is a sequence of calls on tensors of its arena, the same on
// the host and on GPUs, with a group and without.
#pragma once

#include <memory>

#include "epx/epx_moe.h"
#include "moe/block/arena.h"
#include "moe/block/path.h"

namespace epx::moe {

class Block {
public:
  // Uses `shared`, or makes an arena of max_in_flight flights. Collective over the group, which may be NULL. The config and
  // what it points to have passed require_struct; all ranks throw where another thing of it is wrong on one of them.
  Block(epx_group group, const epx_moe_block_config& config, Arena* shared);

  // Check their arguments before anything happens; throw.
  void forward(const epx_moe_block_fwd_args& args);
  void backward(const epx_moe_block_bwd_args& args);

  // Gives back what the group lends to the block's own arena. Collective where it has one; before the destructor.
  void release();

  void read_errors(epx_moe_errors_report* report) const;

private:
  struct FreeRecord {
    void operator()(epx_moe_errors_s* errors) const noexcept;
  };

  int32_t require_flight(int32_t flight) const;

  // How far a call has come.
  struct CallState {
    bool is_captured = false;      // its peers wait for nobody before the graph is replayed
    bool has_called_group = false; // until then the caller can make a call again that was refused
  };
  void forward(const epx_moe_block_fwd_args& args, CallState& state);
  void backward(const epx_moe_block_bwd_args& args, CallState& state);

  // Runs run(state). What fails on this rank alone ends the group, whose other ranks would wait for this one.
  template <typename Run>
  void run_or_abort(const Run& run);

  CallPlace make_place(const epx_moe_cuda* cuda, CallMemory& memory) const; // takes the workspace of the memory

  std::unique_ptr<BlockPath> path_;
  int64_t num_rows_ = 0;                                 // of its receive tensors
  int64_t workspace_bytes_ = 0;                          // of its calls on a GPU
  std::unique_ptr<epx_moe_errors_s, FreeRecord> errors_; // on a GPU
  std::unique_ptr<Arena> own_arena_;
  Arena* arena_;
  int64_t number_; // of the blocks of its arena
};

} // namespace epx::moe
