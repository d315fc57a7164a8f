// SPDX-License-Identifier: Apache-2.0
// Rails move data between the nodes of a group, on a stream, where no rank can access a window of another node. The rail of a
// rank leads to the rank with the same index on each other node, its rail peers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/error.h"
#include "epx/epx.h"
#include "transport/exchange.h"
#include "transport/transport.h"

namespace epx {

// What this rank sends to its rail peer on a node, and gets from it. Both ends know both sizes: the peer's recv_bytes is this
// rank's send_bytes. A size of 0 takes no part. The memory is in the GPU, outside of all windows.
struct RailTransfer {
  int node;
  const void* send;
  int64_t send_bytes;
  void* recv;
  int64_t recv_bytes;
};

// Transfers on a GPU take at most so many SMs, which are to fill a network adapter of 400 Gbit/s, and to leave the others to
// the kernels of epx. Not measured yet: no adapter was at hand.
constexpr int kMaxRailCtas = 8;
// Returns how many SMs transfers take of those that a group uses on this GPU, at most half of them; 0: there are too few.
constexpr int rail_ctas(int num_sms) {
  return std::min(num_sms / 2, kMaxRailCtas);
}

// A call of the rails has failed because a connection to a peer is broken. Most likely a peer has died, not always that one; or
// the network has failed.
class BrokenRailError : public StatusError {
public:
  BrokenRailError(const std::string& message, int peer) : StatusError(EPX_ERROR_SYSTEM, message), peer_(peer) {}
  int peer() const { return peer_; } // -1: not known

private:
  int peer_;
};

// Returns the rank with which all of the transfers are; -1 if there are several.
inline int only_peer(std::span<const RailTransfer> transfers, int rank, int ranks_per_node) {
  int node = -1;
  for (const RailTransfer& transfer : transfers) {
    if (transfer.send_bytes == 0 && transfer.recv_bytes == 0) continue;
    if (node >= 0 && node != transfer.node) return -1;
    node = transfer.node;
  }
  return node < 0 ? -1 : node * ranks_per_node + rank % ranks_per_node;
}

// all_gather() and exchange() return once their work is on the stream, which may be captured. All ranks make the same of these
// calls in the same order. They throw SYSTEM, of which a BrokenRailError is one, TIMEOUT, and ABORTED after abort().
class Rails {
public:
  virtual ~Rails() = default;

  // Gathers `bytes` bytes of each rank of the group into all [P], by rank; `bytes` is the same on all ranks.
  virtual void all_gather(const void* mine, void* all, int64_t bytes, epx_stream stream) = 0;

  // Makes all the transfers at once; the order in which they are listed does not matter. Several may be with one node: the
  // i-th of this rank with a node meets the i-th of that rail peer with this node.
  virtual void exchange(std::span<const RailTransfer> transfers, epx_stream stream) = 0;

  // Ends transfers that wait for a peer. It may be called from any thread, any number of times, and returns at once.
  virtual void abort() noexcept = 0;

  // Returns whether abort() was called; what a transfer has brought then counts for nothing. Any thread may call it.
  virtual bool has_ended() const noexcept = 0;

  // Returns whether a connection to a peer is known to have broken, so that transfers that have been enqueued may never end.
  // Any thread may call it.
  virtual bool is_broken() const noexcept = 0;
};

// The transports of a group of several nodes: windows of the ranks of this node, by index in the node, and rails.
struct MultiNodeTransport {
  std::unique_ptr<Transport> node;
  std::unique_ptr<Rails> rails;
};

} // namespace epx
