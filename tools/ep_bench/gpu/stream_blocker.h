// SPDX-License-Identifier: Apache-2.0
// A StreamBlocker blocks a stream while timed work is queued, and aligns the streams of all ranks by barriers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <cuda_runtime_api.h>

#include "tools/ep_bench/gpu/communicator.h"
#include "tools/ep_bench/gpu/gpu.h"
#include "tools/ep_bench/gpu/peer_memory.h"
#include "tools/ep_bench/gpu/start_kernels.h"
#include "tools/ep_bench/peers.h"

namespace epx::bench {

// Timed work is queued between block() and unblock(): none of it runs before unblock(), so that no time includes the host's own
// speed as long as the queue of the stream is deep enough.
class StreamBlocker {
public:
  // The constructor is collective.
  StreamBlocker(Gpu& gpu, const Peers& peers, int64_t timeout_ms);
  ~StreamBlocker() { unblock(); }
  StreamBlocker(const StreamBlocker&) = delete;
  StreamBlocker& operator=(const StreamBlocker&) = delete;

  // Queues a kernel that blocks the stream until unblock().
  void block();
  void unblock() noexcept;

  // Queues a barrier of the streams of all ranks, which they leave within about 2 microseconds; ranks on several machines leave
  // it as they leave an ncclAllReduce. All ranks call it equally often.
  void rank_barrier();

  // The caller calls it once the stream is idle. It throws RuntimeError when ranks have not come to a rank_barrier() in time;
  // on several machines they are waited for without a limit.
  void check();

  // Is collective.
  void release(const Peers& peers) {
    if (boards_) boards_->release(peers);
  }

private:
  struct FreeHost {
    void operator()(uint64_t* memory) const { cudaFreeHost(memory); }
  };

  Gpu& gpu_;
  uint64_t timeout_ns_;
  int64_t timeout_ms_;
  std::optional<PeerMemory> boards_;           // where all ranks are on one machine
  std::unique_ptr<Communicator> communicator_; // else
  BarrierParams barrier_{};
  std::unique_ptr<uint64_t, FreeHost> ticket_;
  uint64_t num_blocks_ = 0; // calls of block()
};

} // namespace epx::bench
