// Where the streams of all ranks meet before something is timed.
#pragma once

#include <cstdint>
#include <memory>

#include <cuda_runtime_api.h>

#include "tools/ep_bench/gpu.h"
#include "tools/ep_bench/peer_memory.h"
#include "tools/ep_bench/peers.h"
#include "tools/ep_bench/start_kernels.h"

namespace epx::bench {

// What is timed lies between hold() and unblock(): until then nothing of it runs, so that the host's own speed is in no time
// as long as the queue of the stream is deep enough.
class StreamBlocker {
public:
  // Collective.
  StreamBlocker(Gpu& gpu, const Peers& peers, int64_t timeout_ms);
  ~StreamBlocker() { unblock(); }
  StreamBlocker(const StreamBlocker&) = delete;
  StreamBlocker& operator=(const StreamBlocker&) = delete;

  // Holds the stream back until unblock().
  void hold();
  void unblock() noexcept;

  // Lets the stream go on only when every rank's has come here: they leave within about 2 microseconds. All ranks call it
  // equally often.
  void line_up();

  // Once the stream is idle: throws RuntimeError when ranks have not come to a line_up() in time.
  void check();

  void release(const Peers& peers) { boards_.release(peers); } // collective

private:
  struct FreeHost {
    void operator()(uint64_t* memory) const { cudaFreeHost(memory); }
  };

  Gpu& gpu_;
  uint64_t timeout_ns_;
  int64_t timeout_ms_;
  PeerMemory boards_;
  BarrierParams barrier_{};
  std::unique_ptr<uint64_t, FreeHost> ticket_;
  uint64_t held_ = 0; // times
};

} // namespace epx::bench
