// SPDX-License-Identifier: Apache-2.0
// A Transport opens symmetric windows, which are all that the runtime needs from a machine. The runtime asks what a transport
// can do, and never which one it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "transport/exchange.h"
#include "transport/peer_window.h"

namespace epx {

// A Window maps the peers' memory of a symmetric window, and owns this rank's own unless adopt_window() has made it. The
// destructor unmaps the peers' memory and frees what the window owns. It waits for no peer.
class Window {
public:
  virtual ~Window() = default;
  virtual PeerWindow view() const = 0;
  virtual int64_t bytes() const = 0; // per rank
};

class Transport {
public:
  virtual ~Transport() = default;
  virtual WindowAccess window_access() const = 0;

  // Returns whether a line of 128 bytes that a warp stores in one instruction reaches a peer's memory as a whole. It is the
  // same on all ranks.
  virtual bool keeps_lines_whole() const { return false; }

  // Returns false once peers' memory is no longer mapped, because an exchange with them has failed. Any thread may call it.
  virtual bool reaches_peers() const { return true; }

  // From here on a wait for peers ends, with ABORTED, once `has_ended` returns true.
  virtual void end_waits_when(const std::function<bool()>& has_ended) { static_cast<void>(has_ended); }

  // Returns an exchange of all ranks for what they agree on after the group has been created; NULL where only the group's calls
  // can exchange records. A transport whose windows kernels access has one; it may not be used while a call of the group waits
  // on the host.
  virtual Exchange* exchange() = 0;

  // Opens a window of `bytes` zero bytes on every rank. The call is collective over `exchange`; all ranks succeed or all throw:
  // MISMATCH when bytes differ, OUT_OF_MEMORY, SYSTEM; over NCCL also UNSUPPORTED (no NVLink or symmetric memory), TIMEOUT, and
  // ABORTED after end_waits_when().
  virtual std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) = 0;

  // Opens a window over memory that the caller keeps. The call is collective over `exchange`; all ranks succeed or all throw:
  // MISMATCH when bytes differ, INVALID_ARGUMENT (alignment), SYSTEM, UNSUPPORTED when this memory cannot be registered. Where
  // the transport can register no memory, UNSUPPORTED is thrown before anything is exchanged.
  virtual std::unique_ptr<Window> adopt_window(std::byte* memory, int64_t bytes, Exchange& exchange) = 0;
};

// Throws MISMATCH on all ranks, those of other nodes too, unless all of them pass the same size, of a window for instance.
inline void require_equal_bytes(int64_t bytes, Exchange& exchange) {
  if (const auto difference = exchange.find_difference(bytes))
    fail(EPX_ERROR_MISMATCH, "bytes differ between ranks: rank {} asks for {}, rank {} for {}", difference->rank,
         difference->value, difference->other_rank, difference->other_value);
}

} // namespace epx
