// What the runtime needs from a machine: symmetric windows.
#pragma once

#include <cstdint>
#include <memory>

#include "epx/epx.h"
#include "transport/exchange.h"
#include "transport/peer_window.h"

namespace epx {

// One rank's share of a symmetric window, and its view of all the others. Frees its share and unmaps the others when it
// goes; that is local.
class Window {
public:
  virtual ~Window() = default;
  virtual PeerWindow view() const = 0;
  virtual int64_t bytes() const = 0; // of each rank's share
};

class Transport {
public:
  virtual ~Transport() = default;
  virtual epx_transport kind() const = 0;

  // Opens a window of `bytes` zero bytes on every rank. Collective over `exchange`; all ranks succeed or all throw:
  // MISMATCH when bytes differ, OUT_OF_MEMORY, SYSTEM.
  virtual std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) = 0;
};

} // namespace epx
