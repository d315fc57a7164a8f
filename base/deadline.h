// Until when to wait, and how to wait for something that can only be asked about.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace epx {

class Deadline {
public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::hours kForever{24 * 3650}; // a clock that starts at 0 cannot hold all of int64_t

  explicit Deadline(std::chrono::milliseconds timeout)
      : timeout_(timeout), end_(Clock::now() + std::min<std::chrono::milliseconds>(timeout, kForever)) {}

  bool passed() const { return Clock::now() >= end_; }
  Clock::time_point end() const { return end_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // The same timeout in words, a later end.
  Deadline with_grace(std::chrono::milliseconds grace) const {
    Deadline later = *this;
    later.end_ += grace;
    return later;
  }

private:
  std::chrono::milliseconds timeout_;
  Clock::time_point end_;
};

// Sleeps that grow, so that a meeting of prompt ranks is quick and a long wait is cheap.
class PollingPace {
public:
  PollingPace(std::chrono::microseconds first, std::chrono::microseconds longest) : next_(first), longest_(longest) {}

  template <typename AnyDeadline>
  void sleep(const AnyDeadline& deadline) {
    std::this_thread::sleep_until(std::min(Deadline::Clock::now() + next_, deadline.end()));
    next_ = std::min(next_ * 3 / 2, longest_);
  }

private:
  std::chrono::microseconds next_;
  std::chrono::microseconds longest_;
};

// For what is worth doing now and then while polling.
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
  Deadline::Clock::time_point next_; // the first time is always due
};

} // namespace epx
