// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads wait for each other, for no longer than a time limit.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/support/check.h"

namespace epx::test {

// Counts the ranks that have come to a point, to which each comes once.
class Meeting {
public:
  explicit Meeting(int num_ranks) : num_ranks_(num_ranks) {}
  void wait() {
    ++come_;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (come_ < num_ranks_) {
      check(std::chrono::steady_clock::now() < deadline, "not all ranks have come");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

private:
  int num_ranks_;
  std::atomic<int> come_{0};
};

} // namespace epx::test
