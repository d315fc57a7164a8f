// SPDX-License-Identifier: Apache-2.0
// NcclRails are rails by ncclSend, ncclRecv and ncclAllGather, on a communicator of all ranks of the group.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <thread>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "transport/nccl/communicator.h"
#include "transport/rails.h"

namespace epx {

class NcclRails final : public Rails {
public:
  // The communicator has all ranks of the group, in its order; NCCL reaches the GPU that is the calling thread's. It may take
  // `timeout` until the host has enqueued a transfer, for which NCCL may have to connect ranks.
  NcclRails(std::unique_ptr<Communicator> communicator, int rank, int num_ranks, int ranks_per_node,
            std::chrono::milliseconds timeout);
  // Lets NCCL send what it still has for peers, unless abort() was called. A communicator that cannot be freed soon is left to
  // a thread of its own: neither ncclCommFinalize nor ncclCommAbort ends while a CUDA graph that has captured it exists.
  ~NcclRails() override;
  NcclRails(const NcclRails&) = delete;
  NcclRails& operator=(const NcclRails&) = delete;

  // The call is collective: a transfer with each rail peer and an all-gather, so that NCCL connects the ranks now, and not in
  // the first call of the group. Throws TIMEOUT, SYSTEM.
  void connect();

  void all_gather(const void* mine, void* all, int64_t bytes, epx_stream stream) override;
  void exchange(std::span<const RailTransfer> transfers, epx_stream stream) override;
  void abort() noexcept override;
  bool has_ended() const noexcept override;
  bool is_broken() const noexcept override;

private:
  struct State; // shared with the thread, which may outlive this object

  // `peer` is the only one of the operation; -1 if there are several.
  void run(const char* call, int peer, cudaStream_t stream, const std::function<ncclResult_t(ncclComm_t)>& begin);
  static void require_alive(const State& state);

  int rank_;
  int num_ranks_;
  int ranks_per_node_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<State> state_;
  std::thread freer_;
};

} // namespace epx
