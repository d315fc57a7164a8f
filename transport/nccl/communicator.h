// SPDX-License-Identifier: Apache-2.0
// A Communicator owns an NCCL communicator: that of a group, or of the ranks of one node.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include <nccl.h>

#include "transport/nccl/bootstrap_root.h"
#include "transport/nccl/nccl_versions.h"

namespace epx {

// The communicator is non-blocking: this class polls operations in progress, and aborts the communicator at the deadline.
class Communicator {
public:
  // Begins to make the communicator, in a thread of NCCL's own, and waits for nobody. The ranks that have `id` do so together.
  // `root` is that of `id` on the rank that has made it, and NULL on the others. `version` is that of the library that is loaded.
  // NCCL's kernels get `ctas` blocks each. Throws SYSTEM.
  Communicator(const NcclVersion& version, int rank, int num_ranks, const ncclUniqueId& id,
               std::unique_ptr<BootstrapRoot> root, int ctas, std::chrono::milliseconds timeout);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Returns when the communicator is made, which must be so before NCCL is called with it. Throws as wait() does.
  void wait_until_made();
  bool is_made() const { return is_made_; } // and has been waited for

  // All ranks have begun to make it. From here on the destructor waits for NCCL to make it, for a few seconds at most, before it
  // aborts it: of a communicator that is aborted sooner NCCL leaves sockets and memory, on the GPU too.
  void all_ranks_have_begun() { can_be_made_ = true; }

  // NULL after a timeout, and after abort(). Any thread may call it.
  ncclComm_t get() const { return comm_; }
  const NcclVersion& version() const { return version_; }

  // Waits until NCCL has completed what `call` began. Throws TIMEOUT, SYSTEM, ABORTED.
  void wait(ncclResult_t result, const char* call);

  // From here on wait() aborts the communicator, and throws ABORTED, once `has_ended` returns true.
  void end_waits_when(const std::function<bool()>& has_ended) { has_ended_ = has_ended; }

  // Ends NCCL's kernels, and unmaps the memory of the peers. It is local, and never waits for a peer. No thread may be in
  // wait() meanwhile.
  void abort() noexcept;

  // Frees the communicator once NCCL has sent what it still has for peers; get() is NULL then. That may take until the peers
  // receive it. Returns false when it has not been done until `gives_up` returns true.
  bool leave(const std::function<bool()>& gives_up);

private:
  const NcclVersion& version_;          // the loaded library's
  std::unique_ptr<BootstrapRoot> root_; // until the communicator is made
  std::atomic<ncclComm_t> comm_ = nullptr;
  bool is_made_ = false;
  bool can_be_made_ = false;
  std::chrono::milliseconds timeout_;
  std::function<bool()> has_ended_;
};

} // namespace epx
