// SPDX-License-Identifier: Apache-2.0
// A host thread that waits spins shortly, then yields, then sleeps, so that more ranks than cores still run well.
#pragma once

#include <chrono>
#include <thread>

namespace epx {

class Backoff {
public:
  void pause() {
    ++pauses_;
    if (pauses_ <= kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (pauses_ <= kSpins + kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }

  // Returns true once spinning has not helped: then the waiter checks its deadline and publishes whom it waits for.
  bool is_long() const {
    return pauses_ > kSpins;
  }

private:
  static constexpr int kSpins = 64;
  static constexpr int kYields = 4096;
  static constexpr std::chrono::microseconds kSleep{100};
  int pauses_ = 0;
};

} // namespace epx
