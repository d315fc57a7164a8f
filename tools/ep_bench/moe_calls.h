// SPDX-License-Identifier: Apache-2.0
// Calls the functions of epx_moe.h on a Memory.
#pragma once

#include <cstddef>

#include "epx/epx.hpp"
#include "epx/epx_moe.h"
#include "tools/ep_bench/memory.h"

namespace epx::bench {

// MoeCalls adds to a call where it runs, and a workspace, which calls of one stream share. It grows until keep_workspace(): so
// that timed calls, which are like those before, do not ask for its size.
class MoeCalls {
public:
  explicit MoeCalls(Memory& memory) : memory_(memory) {
    cuda_.struct_size = sizeof(cuda_);
    cuda_.stream = memory.stream();
  }

  const epx_moe_cuda* cuda() const { return memory_.is_host() ? nullptr : &cuda_; }

  void keep_workspace() { grows_ = false; }

  // Throws epx::Error with the function's name.
  template <typename Args, typename Function>
  void run(const char* name, Args args, Function&& function) const {
    args.struct_size = sizeof(args);
    args.cuda = cuda();
    require_success(function(&args), name);
  }
  template <typename Args, typename Function, typename WorkspaceBytes>
  void run(const char* name, Args args, Function&& function, WorkspaceBytes&& workspace_bytes) {
    args.struct_size = sizeof(args);
    if (grows_ && !memory_.is_host()) {
      size_t bytes = 0;
      require_success(workspace_bytes(&args, &bytes), name);
      if (bytes > workspace_.size()) workspace_ = Buffer::plain(memory_, bytes);
      cuda_.workspace = workspace_.data();
      cuda_.workspace_bytes = workspace_.size();
    }
    run(name, args, function);
  }

private:
  Memory& memory_;
  bool grows_ = true;
  Buffer workspace_;
  epx_moe_cuda cuda_{};
};

} // namespace epx::bench
