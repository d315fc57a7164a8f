// SPDX-License-Identifier: Apache-2.0
// PeerMemory is memory of each rank's GPU that the kernels of all ranks can load and store, made without the measured library.
#pragma once

#include <cstddef>
#include <vector>

#include "tools/ep_bench/peers.h"

namespace epx::bench {

// The ranks must be processes of one machine (CUDA IPC). The constructor and release() are collective.
class PeerMemory {
public:
  // Allocates `bytes` > 0 zeroed bytes; ranks may pass different numbers. Throws RuntimeError or AgreedError.
  PeerMemory(size_t bytes, const Peers& peers);

  // Closes the peers' memory. This rank's memory stays until the process ends, unless release() was called: to free it while a
  // peer has it open is undefined behaviour.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Frees the memory once all ranks have closed it.
  void release(const Peers& peers);

  std::byte* of(int rank) const { return memory_[rank]; }
  const std::vector<std::byte*>& all() const { return memory_; }

private:
  void close() noexcept;

  int rank_;
  std::vector<std::byte*> memory_; // [P], as this rank's device addresses it
};

} // namespace epx::bench
