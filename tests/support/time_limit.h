// SPDX-License-Identifier: Apache-2.0
// A TimeLimit ends the process, and with it the job that it belongs to, when a test hangs.
#pragma once

#include <signal.h>
#include <unistd.h>

namespace epx::test {

class TimeLimit {
public:
  explicit TimeLimit(unsigned seconds) {
    struct sigaction action {};
    action.sa_handler = [](int) {
      constexpr char kText[] = "a test exceeded its time limit\n";
      [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
      ::_exit(1);
    };
    ::sigaction(SIGALRM, &action, nullptr);
    ::alarm(seconds);
  }
  ~TimeLimit() { ::alarm(0); }
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;
};

} // namespace epx::test
