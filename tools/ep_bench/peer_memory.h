// SPDX-License-Identifier: Apache-2.0
// Memory of each rank's GPU that the kernels of all ranks can load and store, made without the library that is measured.
#pragma once

#include <cstddef>
#include <vector>

#include "tools/ep_bench/peers.h"

namespace epx::bench {

// For ranks that are processes of one machine (CUDA IPC). The constructor and release() are collective.
class PeerMemory {
public:
  // `bytes` > 0 on every rank, zeroed; may differ. Throws RuntimeError or AgreedError.
  PeerMemory(size_t bytes, const Peers& peers);

  // Closes the peers' memory. The own memory stays until the process ends, unless release() was called: to free it while a
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
