// SPDX-License-Identifier: Apache-2.0
// Calls the functions of epx_moe.hpp on a Memory.
#pragma once

#include <cstddef>

#include "epx/epx_moe.hpp"
#include "tools/ep_bench/memory.h"

namespace epx::bench {

// MoeCalls adds to a call where it runs, and a workspace, which calls of one stream share. It grows until keep_workspace(): so
// that timed calls, which are like those before, do not ask for its size.
class MoeCalls {
public:
  explicit MoeCalls(Memory& memory) : memory_(memory), cuda_(memory.stream()) {}

  const epx_moe_cuda* cuda() const { return memory_.is_host() ? nullptr : &cuda_; }

  void keep_workspace() { grows_ = false; }

  // Calls function(args) and throws what it does.
  template <typename Args, typename Function>
  void run(Args args, const Function& function) const {
    args.cuda = cuda();
    function(args);
  }
  template <typename Args, typename Function, typename WorkspaceBytes>
  void run(const Args& args, const Function& function, const WorkspaceBytes& workspace_bytes) {
    if (grows_ && !memory_.is_host()) {
      const size_t bytes = workspace_bytes(args);
      if (bytes > workspace_.size()) workspace_ = Buffer::plain(memory_, bytes);
      cuda_.workspace = workspace_.data();
      cuda_.workspace_bytes = workspace_.size();
    }
    run(args, function);
  }

private:
  Memory& memory_;
  bool grows_ = true;
  Buffer workspace_;
  moe::Cuda cuda_;
};

} // namespace epx::bench
