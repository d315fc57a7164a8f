// SPDX-License-Identifier: Apache-2.0
// Deadlines, and the pace of polling.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace epx {

class Deadline {
public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::hours kForever{24 * 3650}; // ten years; the clock would overflow with the largest int64_t

  explicit Deadline(std::chrono::milliseconds timeout)
      : end_(Clock::now() + std::min<std::chrono::milliseconds>(timeout, kForever)) {}

  bool passed() const { return Clock::now() >= end_; }
  Clock::time_point end() const { return end_; }

private:
  Clock::time_point end_;
};

// Sleeps between polls that grow by half each time: a short wait ends quickly, and a long one is cheap.
class PollingPace {
public:
  PollingPace(std::chrono::microseconds first, std::chrono::microseconds max) : next_(first), max_(max) {}

  template <typename AnyDeadline>
  void sleep(const AnyDeadline& deadline) {
    sleep(deadline, [] { return false; });
  }

  // Ends the sleep soon after gives_up() returns true.
  template <typename AnyDeadline, typename GivesUp>
  void sleep(const AnyDeadline& deadline, const GivesUp& gives_up) {
    const Deadline::Clock::time_point end = std::min(Deadline::Clock::now() + next_, deadline.end());
    for (auto now = Deadline::Clock::now(); now < end && !gives_up(); now = Deadline::Clock::now())
      std::this_thread::sleep_until(std::min(now + kMaxSlice, end));
    next_ = std::min(next_ * 3 / 2, max_);
  }

private:
  static constexpr std::chrono::milliseconds kMaxSlice{50};

  std::chrono::microseconds next_;
  std::chrono::microseconds max_;
};

// Rate limit for work that is done now and then while polling.
class Every {
public:
  explicit Every(std::chrono::milliseconds interval) : interval_(interval) {}

  bool due() {
    const Deadline::Clock::time_point now = Deadline::Clock::now();
    if (now < next_) return false;
    next_ = now + interval_;
    return true;
  }

private:
  std::chrono::milliseconds interval_;
  Deadline::Clock::time_point next_; // starts at the clock's epoch, so the first call of due() returns true
};

} // namespace epx
