// SPDX-License-Identifier: Apache-2.0
// A wait notices that its process was suspended, and extends its deadline. The tests pass the times, and do not wait.
#include <chrono>
#include <cstdint>
#include <limits>

#include <doctest/doctest.h>

#include "base/suspension_aware_deadline.h"

namespace {

using namespace std::chrono_literals;
using epx::SuspensionAwareDeadline;
using Time = SuspensionAwareDeadline::Clock::time_point;

constexpr Time kBegin{1'000h};

// Polls every 10 ms until `end`, and returns when the deadline had passed first; `end` when it had not.
Time poll_until(SuspensionAwareDeadline& deadline, Time begin, Time end) {
  for (Time now = begin; now < end; now += 10ms)
    if (deadline.passed(now)) return now;
  return end;
}

} // namespace

TEST_CASE("without a suspension a wait ends when its timeout is over") {
  SuspensionAwareDeadline deadline(5s, kBegin);
  CHECK(poll_until(deadline, kBegin, kBegin + 1min) == kBegin + 5s);
  CHECK(deadline.suspended() == 0ms);
  // Polls may be up to a second apart.
  SuspensionAwareDeadline slow(3500ms, kBegin);
  for (const auto elapsed : {1s, 2s, 3s})
    CHECK_FALSE(slow.passed(kBegin + elapsed));
  CHECK(slow.passed(kBegin + 4s));
}

TEST_CASE("the time of a suspension does not count, and peers get the timeout anew") {
  SuspensionAwareDeadline deadline(5s, kBegin);
  CHECK(poll_until(deadline, kBegin, kBegin + 4s) == kBegin + 4s);
  const Time resumed = kBegin + 4s + 10h;
  CHECK_FALSE(deadline.passed(resumed));
  CHECK(poll_until(deadline, resumed, resumed + 1min) == resumed + 5s);
  CHECK(deadline.suspended() > 10h - 1s);
  CHECK(deadline.suspended() < 10h + 1s);
  CHECK(deadline.timeout() == 5s);
}

TEST_CASE("a wait lasts no longer than three timeouts without its suspensions") {
  SuspensionAwareDeadline deadline(5s, kBegin);
  Time now = kBegin;
  std::chrono::milliseconds polled{0};
  while (polled < 1min) {
    const Time stopped = poll_until(deadline, now, now + 2s); // then it is stopped for 30 s
    polled += std::chrono::duration_cast<std::chrono::milliseconds>(stopped - now);
    if (stopped < now + 2s) break;
    now = stopped + 30s;
  }
  CHECK(polled >= 15s - 200ms);
  CHECK(polled <= 15s + 200ms); // each suspension begins up to 10 ms after a poll
}

TEST_CASE("a timeout of less than a second notices a shorter suspension") {
  SuspensionAwareDeadline deadline(200ms, kBegin);
  CHECK_FALSE(deadline.passed(kBegin + 100ms));
  CHECK_FALSE(deadline.passed(kBegin + 600ms));
  CHECK(poll_until(deadline, kBegin + 600ms, kBegin + 1min) == kBegin + 800ms);
}

TEST_CASE("grace comes on top, and the largest timeout does not overflow") {
  const SuspensionAwareDeadline deadline(5s, kBegin);
  SuspensionAwareDeadline later = deadline.with_grace(250ms);
  CHECK(poll_until(later, kBegin, kBegin + 1min) == kBegin + 5250ms);
  CHECK(later.timeout() == 5s);
  SuspensionAwareDeadline forever(std::chrono::milliseconds(std::numeric_limits<int64_t>::max()), kBegin);
  CHECK_FALSE(forever.passed(kBegin + 24h * 365));
}
