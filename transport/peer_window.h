// SPDX-License-Identifier: Apache-2.0
// A PeerWindow is the stages' view of memory that every rank of a group can store into: one base pointer per rank. It is a POD
// and is passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace epx {

// Says who loads from and stores to the windows of a group: its ranks' host code, or the kernels that they launch. Kernels need
// windows in device memory.
enum class WindowAccess { by_host, by_kernels };

// The index of a rank's window among those that this rank can access. Tables of base addresses are indexed by it, and by
// nothing else. It equals the rank's number among the ranks that share the windows: in a group of several nodes, in its node.
enum class WindowIndex : int {};

constexpr WindowIndex window_index(int rank) {
  return WindowIndex{rank};
}

struct PeerWindow {
  std::byte* const* bases; // by WindowIndex: each rank's window in this rank's address space
  int rank;                // this rank
  int num_ranks;

  template <typename T>
  EPX_HOST_DEVICE T* at(int peer, int64_t offset) const {
    return reinterpret_cast<T*>(bases[static_cast<int>(window_index(peer))] + offset);
  }
  template <typename T>
  EPX_HOST_DEVICE T* local(int64_t offset) const {
    return at<T>(rank, offset);
  }
};

} // namespace epx
