// SPDX-License-Identifier: Apache-2.0
// SIGINT and SIGTERM end the calls that wait and then the run, on all ranks, so that what was measured is not lost. The creation
// of a group is waited for (KeepWaiting); a second signal ends the process.
#pragma once

#include "tools/ep_bench/errors.h"

namespace epx::bench {

inline constexpr int kExitSignal = 128; // plus the number of the signal, as shells have it

// The first signal is noted and calls epx_interrupt(); a second one ends the process.
void catch_signals();

// Returns the failure of a process that has got a signal, "interrupted by signal 2 (Interrupt)"; of another, success.
Failure interruption();

// While one lives, a signal is noted and interrupts no call, not even one that was pending.
class KeepWaiting {
public:
  KeepWaiting();
  ~KeepWaiting();
  KeepWaiting(const KeepWaiting&) = delete;
  KeepWaiting& operator=(const KeepWaiting&) = delete;
};

} // namespace epx::bench
