// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/interrupt.h"

#include <csignal>
#include <cstring>

#include <fmt/format.h>

#include "epx/epx.h"

namespace epx::bench {
namespace {

volatile std::sig_atomic_t caught_signal = 0, keeps_waiting = 0;

extern "C" void note_signal(int signal) {
  caught_signal = signal;
  if (keeps_waiting == 0) epx_interrupt();
}

} // namespace

void catch_signals() {
  struct sigaction action {};
  action.sa_handler = &note_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (const int signal : {SIGINT, SIGTERM})
    sigaction(signal, &action, nullptr);
}

Failure interruption() {
  const int signal = caught_signal;
  if (signal == 0) return {};
  return {kExitSignal + signal, fmt::format("interrupted by signal {} ({})", signal, strsignal(signal))};
}

KeepWaiting::KeepWaiting() {
  keeps_waiting = 1;
  epx_interrupted(); // forgets the one that is pending
}

KeepWaiting::~KeepWaiting() {
  keeps_waiting = 0;
}

} // namespace epx::bench
