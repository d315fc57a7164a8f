// SPDX-License-Identifier: Apache-2.0
// A Transport opens symmetric windows, which are all that the runtime needs from a machine.
#pragma once

#include <cstdint>
#include <memory>

#include "epx/epx.h"
#include "transport/exchange.h"
#include "transport/peer_window.h"

namespace epx {

// A Window owns one rank's memory of a symmetric window, and its mappings of the peers'. Its destructor frees that memory and
// unmaps the peers'; it is local.
class Window {
public:
  virtual ~Window() = default;
  virtual PeerWindow view() const = 0;
  virtual int64_t bytes() const = 0; // per rank
};

class Transport {
public:
  virtual ~Transport() = default;
  virtual epx_transport kind() const = 0;

  // Opens a window of `bytes` zero bytes on every rank. The call is collective over `exchange`; all ranks succeed or all throw:
  // MISMATCH when bytes differ, OUT_OF_MEMORY, SYSTEM.
  virtual std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) = 0;
};

} // namespace epx
