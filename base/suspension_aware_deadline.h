// SPDX-License-Identifier: Apache-2.0
// A deadline for waits for peers in a process that may be suspended meanwhile: by Ctrl-Z, by a scheduler, by a debugger.
#pragma once

#include <algorithm>
#include <chrono>

#include "base/deadline.h"

namespace epx {

// The wait polls, and calls passed() at every poll. A long gap between two polls means that this process was suspended, and
// then most likely its peers were too: that time does not count. Processes resume one after the other, so after a suspension
// the peers get the whole timeout anew. Not counting suspensions, no wait lasts longer than three times the timeout, however
// often the process is suspended.
class SuspensionAwareDeadline {
public:
  using Clock = Deadline::Clock;

  explicit SuspensionAwareDeadline(std::chrono::milliseconds timeout, Clock::time_point now = Clock::now())
      : timeout_(timeout), allowance_(std::min<std::chrono::milliseconds>(timeout, Deadline::kForever)),
        max_gap_(std::min<std::chrono::milliseconds>(allowance_, kMaxGap)), last_poll_(now), end_(now + allowance_),
        limit_(now + kMaxTimeouts * allowance_) {}

  // One thread calls this at every poll.
  bool passed(Clock::time_point now = Clock::now()) {
    const Clock::duration gap = now - last_poll_;
    last_poll_ = now;
    if (gap > max_gap_) {
      suspended_ += gap;
      limit_ += gap;
      end_ = std::min(std::max(end_ + gap, now + allowance_), limit_);
    }
    return now >= end_;
  }

  Clock::time_point end() const { return end_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  std::chrono::milliseconds suspended() const { return std::chrono::duration_cast<std::chrono::milliseconds>(suspended_); }

  // The copy ends later by `grace`; timeout(), which messages name, stays the same.
  SuspensionAwareDeadline with_grace(std::chrono::milliseconds grace) const {
    SuspensionAwareDeadline later = *this;
    later.allowance_ += grace;
    later.end_ += grace;
    later.limit_ += grace;
    return later;
  }

private:
  static constexpr int kMaxTimeouts = 3;
  static constexpr std::chrono::milliseconds kMaxGap{1'000}; // even on a busy machine a process runs more often than this

  std::chrono::milliseconds timeout_;
  std::chrono::milliseconds allowance_; // the timeout, with grace, as the clock can hold it
  std::chrono::milliseconds max_gap_;
  Clock::time_point last_poll_;
  Clock::time_point end_;
  Clock::time_point limit_;
  Clock::duration suspended_{0};
};

} // namespace epx
