// SPDX-License-Identifier: Apache-2.0
// How often the ranks of a file rendezvous look into its directory while they wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "base/deadline.h"

namespace epx {

// All ranks poll one directory, often on few cores or through one file server. From 50 ranks on each polls the less often the
// more there are: together they look 10,000 times a second.
inline std::chrono::microseconds longest_sleep(int num_ranks) {
  using namespace std::chrono_literals;
  return std::max<std::chrono::microseconds>(5ms, num_ranks * 100us);
}

inline PollingPace polling_pace(int num_ranks) {
  return {std::chrono::microseconds(200), longest_sleep(num_ranks)};
}

// A list of the directory has some names for each rank, and every rank lists it. Up to 452 ranks the interval grows with the
// square of their number: all of them together read no more names in a second than 32 ranks do. 300 ranks that listed it every
// 50 ms kept 2 cores so busy that rank 0 hardly ran: they needed 168 s to meet, and need 3.3 s.
inline std::chrono::milliseconds listing_interval(int num_ranks) {
  constexpr int64_t kFewRanks = 32;
  const int64_t interval_ms = 50 * static_cast<int64_t>(num_ranks) * num_ranks / (kFewRanks * kFewRanks);
  return std::chrono::milliseconds(std::clamp<int64_t>(interval_ms, 50, 10'000));
}

} // namespace epx
