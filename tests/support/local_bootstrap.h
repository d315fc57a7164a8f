// SPDX-License-Identifier: Apache-2.0
// A bootstrap for ranks that are threads of one process: the smallest thing that a framework could bring itself.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "epx/epx.h"

namespace epx::test {

// Serves any number of all-gathers, so any number of groups. Outlives the bootstraps that it gives out.
class LocalMeeting {
public:
  explicit LocalMeeting(int num_ranks);
  LocalMeeting(const LocalMeeting&) = delete;
  LocalMeeting& operator=(const LocalMeeting&) = delete;

  epx_bootstrap bootstrap(int rank); // needs no freeing

private:
  struct Round {
    std::vector<std::vector<std::byte>> parts; // [P]
    std::vector<bool> here;                    // [P]
    int num_here = 0;
    int num_done = 0;
  };
  struct Seat {
    LocalMeeting* meeting = nullptr;
    int rank = 0;
    uint64_t next_round = 0;
  };

  static epx_status all_gather(void* context, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                               char* message, size_t message_bytes);
  epx_status gather(Seat& seat, const void* send, void* recv, size_t bytes, int64_t timeout_ms, char* message,
                    size_t message_bytes);

  int num_ranks_;
  std::vector<Seat> seats_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Round> rounds_;
};

} // namespace epx::test
