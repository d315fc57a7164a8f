// SPDX-License-Identifier: Apache-2.0
// ncclGetUniqueId starts a thread with a listening socket, NCCL's bootstrap root. Both end once all ranks of the communicator
// have come to it, and not before: NCCL has no call that ends them. A BootstrapRoot owns the id and its root.
#pragma once

#include <nccl.h>

namespace epx {

class BootstrapRoot {
public:
  BootstrapRoot(); // throws SYSTEM
  // Ends the root, unless all ranks have come. It calls neither NCCL nor CUDA, which may be what has failed.
  ~BootstrapRoot();
  BootstrapRoot(const BootstrapRoot&) = delete;
  BootstrapRoot& operator=(const BootstrapRoot&) = delete;

  const ncclUniqueId& id() const { return id_; }

  // The communicator of the id is made, so the root ends by itself.
  void all_ranks_have_come() { is_waiting_ = false; }

private:
  ncclUniqueId id_{};
  bool is_waiting_ = true;
};

} // namespace epx
